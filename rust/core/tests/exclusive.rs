//! The exclusive scheduler on small cases with known results.

use std::sync::Arc;

use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::decide::{Kind, Wait};
use neuron_sched_core::exclusive::{ExclusiveScheduler, Finish, NewRequest, Options, Status, Tokens};
use neuron_sched_core::request::{Prompt, Row, Sampling};

fn config(seqs: i64, tokens: i64, len: i64, block: i64, blocks: i64) -> RawConfig {
    RawConfig {
        max_num_seqs: Some(seqs),
        max_num_batched_tokens: Some(tokens),
        max_model_len: Some(len),
        block_size: Some(block),
        num_blocks: Some(blocks),
        ..RawConfig::default()
    }
}

fn scheduler(raw: &RawConfig) -> ExclusiveScheduler {
    ExclusiveScheduler::new(&Config::resolve(raw).unwrap())
}

fn length(prompt: u32, max_tokens: u32) -> NewRequest {
    NewRequest {
        prompt: Prompt::Length(prompt),
        max_tokens,
        priority: 0,
        stop_token_ids: Box::default(),
        sampling: Sampling::default(),
    }
}

fn tokens(prompt: impl IntoIterator<Item = u32>, max_tokens: u32) -> NewRequest {
    NewRequest { prompt: Prompt::Tokens(prompt.into_iter().collect()), ..length(1, max_tokens) }
}

/// Kind of a step, (row index, tokens) of each row, padded size.
type Planned = (Kind, Vec<(usize, u32)>, u32);

/// Plan and complete steps with token ids until all requests have finished.
fn run(scheduler: &mut ExclusiveScheduler) -> Vec<Planned> {
    let mut steps = Vec::new();
    loop {
        let step = Arc::clone(scheduler.schedule(Options::default()).unwrap());
        if step.kind() == Kind::Idle {
            return steps;
        }
        let rows = step.rows().iter().enumerate().map(|(at, row)| (row.index(), step.tokens(at))).collect();
        steps.push((step.kind(), rows, step.padded_tokens()));
        let given: Vec<Option<u32>> = (0..step.rows().len()).map(|at| step.emits(at).then_some(9)).collect();
        scheduler.complete(step.id(), Tokens::Given(&given)).unwrap();
    }
}

#[test]
fn v22_five_requests_run_in_four_slots_in_uneven_chunks() {
    let mut scheduler = scheduler(&config(4, 64, 256, 16, 399));
    for _ in 0..5 {
        scheduler.add(length(100, 3)).unwrap();
    }
    let steps = run(&mut scheduler);
    let kinds: String = steps.iter().map(|step| if step.0 == Kind::Prefill { 'p' } else { 'd' }).collect();
    assert_eq!(kinds, "ppppppppddppdd");
    assert_eq!(steps.iter().flat_map(|step| &step.1).map(|&(_, tokens)| tokens).sum::<u32>(), 510);
    assert_eq!((scheduler.free_blocks(), scheduler.reserved_blocks(), scheduler.state()), (399, 0, Kind::Idle));
}

#[test]
fn v19_prefix_cache_hits_shorten_the_prefill() {
    let raw = RawConfig { prefix_caching: Some(true), ..config(4, 512, 1024, 16, 399) };
    let mut scheduler = scheduler(&raw);
    for prompt in
        [(0..130).collect::<Vec<u32>>(), (0..130).collect(), (0..128).chain([999]).collect(), (0..128).collect()]
    {
        scheduler.add(tokens(prompt, 1)).unwrap();
    }
    let steps = run(&mut scheduler);
    let sizes: Vec<(u32, u32)> = steps.iter().map(|step| (step.1[0].1, step.2)).collect();
    assert_eq!(sizes, [(130, 256), (2, 128), (1, 128), (16, 128)]);
    assert_eq!(scheduler.free_blocks(), 399);
}

#[test]
fn a_stop_token_wins_over_the_length_and_outputs_are_kept() {
    let mut scheduler = scheduler(&config(4, 64, 256, 16, 99));
    let stop = Box::from([7]);
    let row = scheduler.add(NewRequest { stop_token_ids: stop, ..tokens(0..10, 2) }).unwrap();
    let mut last = None;
    for token in [5, 7] {
        let step = Arc::clone(scheduler.schedule(Options::default()).unwrap());
        last = scheduler.complete(step.id(), Tokens::Given(&[Some(token)])).unwrap().outcome(0);
    }
    assert_eq!(last.map(|outcome| (outcome.token, outcome.finish)), Some((Some(7), Some(Finish::Stop))));
    let view = scheduler.view(row).unwrap();
    assert_eq!((view.status, view.computed, view.outputs), (Status::Finished(Finish::Stop), 11, &[5, 7][..]));
}

#[test]
fn a_step_ahead_assumes_that_the_step_in_flight_emits() {
    let mut scheduler = scheduler(&config(2, 64, 256, 16, 99));
    let a = scheduler.add(length(100, 3)).unwrap();
    let ahead = Options { ahead: true, ..Options::default() };
    let steps: Vec<_> = (0..2).map(|_| Arc::clone(scheduler.schedule(ahead).unwrap())).collect();
    assert_eq!((steps[0].tokens(0), steps[1].tokens(0), steps[1].computed(0)), (64, 36, 64));
    assert!(scheduler.schedule(ahead).is_err());
    assert!(scheduler.complete(steps[1].id(), Tokens::LeftOut).is_err());
    assert!(scheduler.complete(steps[0].id(), Tokens::LeftOut).unwrap().is_empty());
    let decode = Arc::clone(scheduler.schedule(ahead).unwrap());
    assert_eq!((decode.kind(), decode.computed(0)), (Kind::Decode, 100));
    scheduler.cancel(a);
    assert!(scheduler.complete(steps[1].id(), Tokens::LeftOut).unwrap().is_empty());
    assert!(scheduler.complete(decode.id(), Tokens::LeftOut).unwrap().is_empty());
    let idle = Arc::clone(scheduler.schedule(ahead).unwrap());
    assert_eq!((idle.kind(), idle.finished()), (Kind::Idle, &[a][..]));
}

#[test]
fn explain_names_the_reason_why_the_head_waits() {
    let raw = RawConfig { max_consecutive_prefill_steps: Some(1), ..config(2, 64, 256, 16, 20) };
    let mut scheduler = scheduler(&raw);
    let wait = |scheduler: &ExclusiveScheduler| scheduler.explain().map(|explanation| explanation.wait);
    let step = |scheduler: &mut ExclusiveScheduler, throttle_prefills| {
        let step = Arc::clone(scheduler.schedule(Options { throttle_prefills, ahead: false }).unwrap());
        let in_flight = wait(scheduler);
        scheduler.complete(step.id(), Tokens::LeftOut).unwrap();
        (step.kind(), in_flight, wait(scheduler))
    };
    scheduler.add(length(100, 50)).unwrap();
    assert_eq!(wait(&scheduler), Some(Wait::Ready));
    assert_eq!(step(&mut scheduler, false), (Kind::Prefill, None, None));
    scheduler.add(length(200, 50)).unwrap();
    assert_eq!(step(&mut scheduler, false).1, Some(Wait::PrefillInProgress));
    assert_eq!(step(&mut scheduler, false).1, Some(Wait::Kv));
    assert_eq!(scheduler.explain().map(|e| (e.needed, e.reserved, e.usable)), Some((16, 10, 20)));
    let head = scheduler.explain().unwrap().row;
    scheduler.cancel(head);
    scheduler.add(length(20, 50)).unwrap();
    assert_eq!(step(&mut scheduler, true), (Kind::Decode, Some(Wait::Throttled), Some(Wait::Ready)));
    scheduler.add(length(20, 50)).unwrap();
    assert_eq!(step(&mut scheduler, false), (Kind::Prefill, Some(Wait::Slots), Some(Wait::Slots)));
}

#[test]
fn completing_several_decode_steps_at_once_equals_single_steps() {
    let build = || {
        let mut scheduler = scheduler(&config(8, 64, 256, 4, 200));
        for (prompt, outputs) in [(5, 30), (9, 17), (16, 40), (3, 21)] {
            scheduler.add(length(prompt, outputs)).unwrap();
        }
        scheduler
    };
    let blocks = |scheduler: &ExclusiveScheduler, rows: &[Row]| -> Vec<Option<Vec<u32>>> {
        rows.iter().map(|&row| scheduler.view(row).map(|view| view.blocks.to_vec())).collect()
    };
    let (mut stepped, mut jumped) = (build(), build());
    while jumped.num_running() + jumped.num_waiting() > 0 {
        let step = Arc::clone(jumped.schedule(Options::default()).unwrap());
        let times = jumped.decode_horizon();
        let last = jumped.complete_decodes(step.id(), times).unwrap();
        let mut single = None;
        for _ in 0..times {
            let step = Arc::clone(stepped.schedule(Options::default()).unwrap());
            single = Some(Arc::clone(stepped.complete(step.id(), Tokens::LeftOut).unwrap()));
        }
        assert_eq!(last.iter().collect::<Vec<_>>(), single.unwrap().iter().collect::<Vec<_>>());
        assert_eq!(blocks(&jumped, step.rows()), blocks(&stepped, step.rows()));
    }
    assert_eq!(stepped.num_running(), 0);
}

#[test]
fn a_waiting_request_takes_less_than_200_bytes() {
    for policy in ["fcfs", "priority"] {
        let raw = RawConfig { policy: Some(policy.into()), ..config(4, 64, 256, 16, 99) };
        let mut scheduler = scheduler(&raw);
        let count = 100_000;
        for _ in 0..count {
            scheduler.add(length(100, 3)).unwrap();
        }
        let each = scheduler.heap_bytes() / count;
        assert!((50..200).contains(&each), "{each} bytes, {policy}");
    }
}
