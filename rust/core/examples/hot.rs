//! Hot paths of the core, one per run. `benches/instructions.py` counts their instructions under callgrind.
//!
//! `hot CASE` prepares the case and then runs its work inside [`measured`]. Only that function is counted, so a change
//! of the preparation does not change the count.

#[path = "../tests/support/mod.rs"]
mod support;

use std::hint::black_box;

use neuron_sched_core::config::{Buckets, Config, RawConfig};
use neuron_sched_core::decide::Kind;
use neuron_sched_core::exclusive::{ExclusiveScheduler, NewRequest, Options, Tokens};
use neuron_sched_core::fill::{Layout, Shape};
use neuron_sched_core::mixed::{MixedScheduler, NewMixed};
use neuron_sched_core::queue::{Policy, Queue};
use neuron_sched_core::request::{Prompt, Row, Sampling, Slab};
use neuron_sched_core::sim::{self, Arrival, Cost, Scheduler, replay};

/// Waiting requests in the queue cases.
const WAITING: usize = 10_000;

/// Running requests in the scheduler cases.
const RUNNING: u32 = 1024;

/// Counted decode steps, and counted fills.
const STEPS: usize = 100;

/// Run the work of a case. Callgrind turns counting on and off by the name of this function.
#[inline(never)]
fn measured<R>(work: impl FnOnce() -> R) -> R {
    black_box(work())
}

fn main() {
    let case = std::env::args().nth(1).expect("the first argument names the case");
    match case.as_str() {
        "bucket_fit" => bucket_fit(),
        "queue_fcfs" => queue(Policy::Fcfs),
        "queue_priority" => queue(Policy::Priority),
        "exclusive_decode" => exclusive_decode(),
        "exclusive_drain" => exclusive_drain(),
        "fill_decode" => fill_decode(),
        "fill_prefill" => fill_prefill(),
        "mixed_decode" => mixed_decode(),
        "mixed_drain" => mixed_drain(),
        "replay_exclusive" => replay_workload(Scheduler::Bucket),
        "replay_mixed" => replay_workload(Scheduler::Mixed),
        _ => panic!("unknown case {case}"),
    }
}

fn bucket_fit() {
    let buckets = Buckets::doubling(128, 8192);
    let largest = measured(|| (1..=8192).map(|count| buckets.fit(black_box(count)).expect("a bucket")).max());
    assert_eq!(largest, Some(8192));
}

fn queue(policy: Policy) {
    let mut slab = Slab::default();
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

fn config(max_num_seqs: u32) -> Config {
    let raw = RawConfig {
        max_num_seqs: Some(i64::from(max_num_seqs)),
        max_num_batched_tokens: Some(8192),
        max_model_len: Some(4096),
        block_size: Some(32),
        num_blocks: Some(1 << 17),
        max_prefills_per_batch: Some(i64::from(max_num_seqs)),
        ..RawConfig::default()
    };
    Config::resolve(&raw).expect("a valid configuration")
}

fn exclusive() -> ExclusiveScheduler {
    ExclusiveScheduler::new(&config(RUNNING))
}

/// Plan and complete one step, and return its kind.
fn exclusive_step(scheduler: &mut ExclusiveScheduler) -> Kind {
    let step = scheduler.schedule(Options::default()).expect("a step");
    let (id, kind) = (step.id(), step.kind());
    scheduler.complete(id, Tokens::LeftOut).expect("a completion");
    kind
}

/// Add requests of different lengths, so that they neither start nor finish together.
fn exclusive_add(scheduler: &mut ExclusiveScheduler, count: u32, max_tokens: u32) {
    for i in 0..count {
        let prompt = Prompt::Length(1 + i * 37 % 500);
        let max_tokens = max_tokens + i % 64;
        let request = NewRequest {
            prompt,
            max_tokens,
            priority: 0,
            stop_token_ids: Box::default(),
            sampling: Sampling::default(),
        };
        scheduler.add(request).expect("a request that fits");
    }
}

fn exclusive_decode() {
    let mut scheduler = exclusive();
    exclusive_add(&mut scheduler, RUNNING, 2000);
    while exclusive_step(&mut scheduler) == Kind::Prefill {}
    measured(|| (0..STEPS).for_each(|_| assert_eq!(exclusive_step(&mut scheduler), Kind::Decode)));
    assert_eq!(scheduler.num_running(), RUNNING as usize);
}

fn exclusive_drain() {
    let mut scheduler = exclusive();
    measured(|| {
        exclusive_add(&mut scheduler, 4 * RUNNING, 1);
        while exclusive_step(&mut scheduler) != Kind::Idle {}
    });
    assert_eq!(scheduler.num_waiting(), 0);
}

/// Add requests with prompts of token ids.
fn exclusive_add_tokens(scheduler: &mut ExclusiveScheduler, lengths: impl Iterator<Item = u32>) {
    for length in lengths {
        let request = NewRequest {
            prompt: Prompt::Tokens((0..length).collect()),
            max_tokens: 10,
            priority: 0,
            stop_token_ids: Box::default(),
            sampling: Sampling::default(),
        };
        scheduler.add(request).expect("a request that fits");
    }
}

/// Fill the tensors of a prompt of 4,000 tokens.
fn fill_prefill() {
    let config = config(1);
    let mut scheduler = ExclusiveScheduler::new(&config);
    exclusive_add_tokens(&mut scheduler, [4000].into_iter());
    let step = scheduler.schedule(Options::default()).expect("a step");
    let step = step.clone();
    let layout = Layout::new(&config, None).expect("a layout");
    let mut memory = support::Memory::new(&layout, Shape::Prefill { tokens: step.padded_tokens() });
    let fill = |_| memory.prefill().write(&layout, [scheduler.prefill_row(&step, 0).expect("a readable step")]);
    measured(|| (0..STEPS).for_each(fill));
    assert_eq!((memory.ids[0][3999], memory.int64[1][4000]), (3999, -1));
}

/// Fill the tensors of all requests, with block tables of 128 blocks that are half full on average.
fn fill_decode() {
    let config = config(RUNNING);
    let mut scheduler = ExclusiveScheduler::new(&config);
    exclusive_add_tokens(&mut scheduler, (0..RUNNING).map(|i| 1 + i * 37 % 4000));
    let step = loop {
        let step = scheduler.schedule(Options::default()).expect("a step").clone();
        if step.kind() == Kind::Decode {
            break step;
        }
        let tokens: Vec<Option<u32>> = (0..step.rows().len()).map(|at| step.emits(at).then_some(5)).collect();
        scheduler.complete(step.id(), Tokens::Given(&tokens)).expect("a completion");
    };
    let layout = Layout::new(&config, None).expect("a layout");
    let mut memory = support::Memory::new(&layout, Shape::Decode { rows: RUNNING, context: 4096 });
    let fill = |_| {
        scheduler.check_decodes(&step, None).expect("known tokens");
        memory.decode().write(&layout, scheduler.decode_rows(&step, None));
    };
    measured(|| (0..STEPS).for_each(fill));
    assert_eq!(memory.ids[0], [5; RUNNING as usize]);
}

fn mixed() -> MixedScheduler {
    MixedScheduler::new(8192, u64::from(RUNNING), 1 << 22).expect("a valid configuration")
}

/// Add requests of different lengths, so that they neither start nor finish together.
fn mixed_add(scheduler: &mut MixedScheduler, count: u32, max_new: u32) {
    for i in 0..u64::from(count) {
        let max_new = u64::from(max_new) + i % 64;
        let request = NewMixed { prompt_len: 1 + i * 37 % 500, max_new, prefilled: 0, generated: 0 };
        scheduler.add(request).expect("a request that fits");
    }
}

/// Plan and complete one step, and return the number of scheduled requests.
fn mixed_step(scheduler: &mut MixedScheduler) -> usize {
    let count = scheduler.schedule().len();
    scheduler.complete().expect("a completion");
    count
}

fn mixed_decode() {
    let mut scheduler = mixed();
    mixed_add(&mut scheduler, RUNNING, 2000);
    while scheduler.schedule().iter().any(|planned| planned.tokens > 1) {
        scheduler.complete().expect("a completion");
    }
    measured(|| (0..STEPS).for_each(|_| assert_eq!(mixed_step(&mut scheduler), RUNNING as usize)));
}

fn mixed_drain() {
    let mut scheduler = mixed();
    measured(|| {
        mixed_add(&mut scheduler, 4 * RUNNING, 1);
        while mixed_step(&mut scheduler) > 0 {}
    });
    assert_eq!(scheduler.num_waiting(), 0);
}

/// Replay a workload in which three requests arrive together every 600 ms, each with 100 to 2,000 output tokens.
fn replay_workload(scheduler: Scheduler) {
    let arrival = |i: u32| Arrival {
        at: u64::from(i / 3) * 600_000_000,
        prompt: Prompt::Length(1 + i * 37 % 1500),
        outputs: 100 + i * 61 % 1900,
        priority: 0,
    };
    let workload: Vec<Arrival> = (0..2_000).map(arrival).collect();
    let cost = Cost::constant(100_000_000, 25_000_000);
    let options = sim::Options::default();
    let observer = &mut |_| std::ops::ControlFlow::Continue(());
    let report = measured(|| replay(&workload, scheduler, &config(96), &cost, options, observer));
    let report = report.expect("a valid workload").expect("the observer never stops the replay");
    assert_eq!(report.summary.rejected, 0);
}
