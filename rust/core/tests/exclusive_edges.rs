//! Edge cases of the exclusive scheduler that its Python API cannot reach.

use std::sync::Arc;

use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::decide::Kind;
use neuron_sched_core::exclusive::{ExclusiveScheduler, NewRequest, Options, Tokens};
use neuron_sched_core::request::{Prompt, SEGMENT_ID_MAX, Sampling};

fn raw() -> RawConfig {
    RawConfig {
        max_num_seqs: Some(2),
        max_num_batched_tokens: Some(8),
        max_model_len: Some(40),
        block_size: Some(8),
        num_blocks: Some(20),
        ..RawConfig::default()
    }
}

fn scheduler(raw: &RawConfig) -> ExclusiveScheduler {
    ExclusiveScheduler::new(&Config::resolve(raw).unwrap())
}

fn request(prompt: Prompt, max_tokens: u32) -> NewRequest {
    NewRequest { prompt, max_tokens, priority: 0, stop_token_ids: Box::default(), sampling: Sampling::default() }
}

/// Plan and complete one step, and return its kind and the computed tokens of its first row.
fn advance(scheduler: &mut ExclusiveScheduler) -> (Kind, u32) {
    let step = Arc::clone(scheduler.schedule(Options::default()).unwrap());
    scheduler.complete(step.id(), Tokens::LeftOut).unwrap();
    (step.kind(), step.computed(0))
}

#[test]
fn a_prompt_in_progress_limits_the_decode_horizon_to_1() {
    let mut s = scheduler(&RawConfig { max_consecutive_prefill_steps: Some(1), ..raw() });
    s.add(request(Prompt::Length(4), 10)).unwrap();
    assert_eq!(advance(&mut s), (Kind::Prefill, 0));
    s.add(request(Prompt::Length(20), 1)).unwrap();
    assert_eq!(advance(&mut s), (Kind::Prefill, 0));
    let step = Arc::clone(s.schedule(Options::default()).unwrap());
    assert_eq!(
        (step.kind(), s.decode_horizon()),
        (Kind::Decode, 1),
        "one decode step is due before the prompt continues"
    );
    assert!(s.complete_decodes(step.id(), 2).is_err());
    s.complete_decodes(step.id(), 1).unwrap();
    assert_eq!(advance(&mut s), (Kind::Prefill, 8));
}

#[test]
fn a_step_ahead_limits_the_decode_horizon_to_1() {
    let mut s = scheduler(&raw());
    s.add(request(Prompt::Length(4), 10)).unwrap();
    advance(&mut s);
    let step = Arc::clone(s.schedule(Options::default()).unwrap());
    assert_eq!(s.decode_horizon(), 9);
    let ahead = Arc::clone(s.schedule(Options { ahead: true, ..Options::default() }).unwrap());
    assert_eq!(s.decode_horizon(), 1);
    assert!(s.complete_decodes(step.id(), 2).is_err());
    s.complete(step.id(), Tokens::LeftOut).unwrap();
    s.complete(ahead.id(), Tokens::LeftOut).unwrap();
    assert_eq!(advance(&mut s), (Kind::Decode, 6));
}

#[test]
fn segments_with_adjacent_ids_share_no_blocks_up_to_the_largest_id() {
    let mut s = scheduler(&RawConfig { prefix_caching: Some(true), ..raw() });
    let segment = |id| request(Prompt::Segments { ids: Box::new([id]), length: 9 }, 1);
    let mut hits = Vec::new();
    for id in [SEGMENT_ID_MAX, SEGMENT_ID_MAX - 1, 0, SEGMENT_ID_MAX] {
        s.add(segment(id)).unwrap();
        hits.push(advance(&mut s).1);
        while s.num_running() > 0 {
            advance(&mut s);
        }
    }
    assert_eq!(hits, [0, 0, 0, 8]);
    assert!(s.add(segment(SEGMENT_ID_MAX + 1)).is_err());
}
