//! Malformed requests of every kind, one after another and many at once; the server stays well.

mod common;

use std::time::Duration;

use common::hostile::{Random, Target, attack, check_health, kinds};
use common::{Running, infer_body};
use meganeura_serve::Options;

fn target(server: &Running, max_body: usize) -> Target {
    let valid = serde_json::from_str(&infer_body(1, 2, 0.5)).unwrap();
    Target { address: server.address, model: "fake".into(), valid, max_body }
}

fn options() -> Options {
    Options {
        max_body: 1 << 20,
        body_timeout: Duration::from_millis(300),
        header_timeout: Duration::from_secs(2),
        ..Options::default()
    }
}

#[test]
fn every_kind_of_malformed_request_is_refused() {
    let server = Running::start(options());
    let target = target(&server, 1 << 20);
    assert!(kinds() >= 40);
    check_health(&target).unwrap();
    let failures: Vec<String> = (0..kinds()).filter_map(|kind| attack(kind, kind as u64, &target).err()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    check_health(&target).unwrap();
}

#[test]
fn malformed_requests_at_once_leave_the_server_well() {
    let server = Running::start(options());
    let target = target(&server, 1 << 20);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let attacker = |thread: u64| {
            let mut random = Random(thread);
            let target = &target;
            (0..150).filter_map(move |_| attack(random.below(kinds()), random.next(), target).err()).collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..8).map(|thread| scope.spawn(move || attacker(thread))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    check_health(&target).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(server.metric("meganeura_queue_requests"), 0.0);
}
