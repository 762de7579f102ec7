//! Work on the processors of the host.

use std::sync::atomic::{AtomicUsize, Ordering};

/// `f` of every index below `count`, in order, by as many threads as the machine has. What `f` returns must not depend on the thread.
pub fn parallel_map<T: Send>(count: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count);
    let next = AtomicUsize::new(0);
    let work = || {
        let claim = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&index| index < count);
        std::iter::from_fn(claim).map(|index| (index, f(index))).collect::<Vec<_>>()
    };
    let mut made = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut made = work();
        for other in others {
            match other.join() {
                Ok(part) => made.extend(part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        made
    });
    made.sort_by_key(|&(index, _)| index);
    made.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order() {
        assert_eq!(parallel_map(1000, |i| i * i), (0..1000).map(|i| i * i).collect::<Vec<_>>());
        assert_eq!(parallel_map(0, |i| i), Vec::<usize>::new());
    }

    #[test]
    #[should_panic(expected = "seven")]
    fn a_panic_is_passed_on() {
        parallel_map(64, |i| assert!(i != 7, "seven"));
    }
}
