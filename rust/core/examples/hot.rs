//! The core's hot paths, one a run, for `benches/instructions.py` to count under callgrind.
//!
//! `hot CASE` prepares everything first; only what happens inside [`measured`] is counted, so that a count
//! moves when the core moves and not when the preparation does.

use std::hint::black_box;

use neuron_sched_core::bucket::Buckets;
use neuron_sched_core::queue::{Policy, Queue};
use neuron_sched_core::request::{Row, Rows};

/// Requests that wait in the queue cases.
const WAITING: usize = 10_000;

/// Runs the work of a case. Callgrind switches its counting on and off by this function's name.
#[inline(never)]
fn measured<R>(work: impl FnOnce() -> R) -> R {
    black_box(work())
}

fn main() {
    let case = std::env::args().nth(1).expect("the name of a case");
    match case.as_str() {
        "bucket_fit" => bucket_fit(),
        "queue_fcfs" => queue(Policy::Fcfs),
        "queue_priority" => queue(Policy::Priority),
        _ => panic!("no case is called {case}"),
    }
}

fn bucket_fit() {
    let buckets = Buckets::doubling(128, 8192);
    let largest = measured(|| (1..=8192).map(|count| buckets.fit(black_box(count)).expect("a bucket")).max());
    assert_eq!(largest, Some(8192));
}

fn queue(policy: Policy) {
    let mut slab = Rows::default();
    let rows: Vec<Row> = (0..WAITING).map(|_| slab.insert(())).collect();
    let mut queue = Queue::new(policy);
    let popped = measured(|| {
        for (&row, priority) in rows.iter().zip((0..7).cycle()) {
            queue.push(row, priority);
        }
        std::iter::from_fn(|| queue.pop()).count()
    });
    assert_eq!(popped, WAITING);
}
