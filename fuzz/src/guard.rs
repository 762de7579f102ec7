//! What stops a case that does not stop: a clock and a ceiling of memory. What a panic said.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::io::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bytes that the process may have allocated at once.
const CEILING: usize = 1 << 30;
/// Time that one case may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// No case is running.
const IDLE: u64 = u64::MAX;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static CASE: AtomicU64 = AtomicU64::new(0);
/// When the case began, in milliseconds of the process.
static BEGAN: AtomicU64 = AtomicU64::new(IDLE);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: memory comes from the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn count(size: usize) {
    let live = LIVE.fetch_add(size, Relaxed).saturating_add(size);
    PEAK.fetch_max(live, Relaxed);
    if live > CEILING {
        give_up("more than 1 GiB of memory");
    }
}

/// Ends the process and names the case. Allocates nothing.
fn give_up(why: &str) -> ! {
    let (mut digits, mut at, mut number) = ([0u8; 20], 20, CASE.load(Relaxed));
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 || at == 0 {
            break;
        }
    }
    let mut stderr = std::io::stderr();
    for part in [b"case ".as_slice(), &digits[at..], b": ", why.as_bytes(), b"\n"] {
        if stderr.write_all(part).is_err() {
            break;
        }
    }
    std::process::abort()
}

/// The most that was allocated at once.
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Starts the clock, and keeps what panics say to itself.
pub fn install() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.to_string().replace('\n', " ");
        PANIC.set(message);
    }));
    let start = Instant::now();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let now = start.elapsed().as_millis() as u64;
            // The case sets 0 when it begins; the clock notes when it first sees that.
            let began = match BEGAN.compare_exchange(0, now, Relaxed, Relaxed) {
                Ok(_) => now,
                Err(began) => began,
            };
            if began != IDLE && now.saturating_sub(began) > PATIENCE.as_millis() as u64 {
                give_up("more than 5 seconds");
            }
        }
    });
}

/// Runs one part of a case under the clock.
pub fn watched<T>(number: u64, work: impl FnOnce() -> T) -> T {
    CASE.store(number, Relaxed);
    BEGAN.store(0, Relaxed);
    let result = work();
    BEGAN.store(IDLE, Relaxed);
    result
}

/// The result, or what the panic said.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).map_err(|_| PANIC.take())
}
