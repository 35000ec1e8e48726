//! Random configurations and requests, so small that blocks, slots and budgets are always scarce.

use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::request::{Prompt, SEGMENT_TOKENS};
use proptest::prelude::*;

/// Number of token sequences from which prompts are taken, so small that prompts often share a prefix.
const SEQUENCES: u32 = 3;

/// Largest sizes in tokens: requests of a few tokens, or of a few segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    pub(crate) length_max: u32,
    block_max: u32,
}

pub(crate) const SMALL: Scale = Scale { length_max: 40, block_max: 8 };
pub(crate) const SEGMENTS: Scale = Scale { length_max: 3 * SEGMENT_TOKENS, block_max: 600 };

fn sizes(last: i64) -> impl Strategy<Value = Vec<i64>> {
    proptest::collection::btree_set(1..=last, 0..4).prop_map(move |mut sizes| {
        sizes.insert(last);
        sizes.into_iter().collect()
    })
}

pub(crate) fn configs() -> impl Strategy<Value = (Scale, Config)> {
    prop_oneof![9 => Just(SMALL), 1 => Just(SEGMENTS)].prop_flat_map(|scale| {
        let length_max = i64::from(scale.length_max);
        let limits =
            (1..=5_i64, length_max / 8..=length_max, length_max / 10..=length_max, 1..=i64::from(scale.block_max));
        limits.prop_flat_map(move |(seqs, tokens, length, block_size)| {
            let tokens = tokens.max(seqs);
            let longest = (length + block_size - 1) / block_size;
            let budget = tokens.min(length);
            let shapes = (proptest::option::of(sizes(budget)), proptest::option::of(sizes(seqs)));
            let cache = (1..=longest * 3 + 1, any::<bool>(), 0..=3_i64, proptest::bool::weighted(0.15));
            let phases = (proptest::option::of(1..=3_i64), 1..=3_i64, 1..=3_i64);
            let chunking =
                (any::<bool>(), any::<bool>(), prop_oneof![3 => Just(0), 1 => 1..=length_max / 5], 0..=9_u32);
            let fixed = (Just(seqs), Just(tokens), Just(length), Just(block_size), any::<bool>());
            (fixed, shapes, cache, phases, chunking).prop_map(move |(fixed, shapes, cache, phases, chunking)| {
                let (seqs, tokens, length, block_size, priority) = fixed;
                let (num_blocks, prefix_caching, lookahead, longest_rule) = cache;
                let (buckets, costed, threshold, seed) = (shapes.0, chunking.1, chunking.2, chunking.3);
                // In some tables a larger call is cheaper than a smaller one.
                let cost = |size: i64| (size, f64::from((u32::try_from(size).unwrap() * (seed + 1)) % 13 + seed));
                let raw = RawConfig {
                    max_num_seqs: Some(seqs),
                    max_num_batched_tokens: Some(tokens),
                    max_model_len: Some(length),
                    block_size: Some(block_size),
                    num_blocks: Some(if longest_rule { num_blocks.max(longest) } else { num_blocks }),
                    prefill_cost: buckets
                        .as_ref()
                        .filter(|_| costed)
                        .map(|sizes| sizes.iter().map(|&size| cost(size)).collect()),
                    num_batched_tokens_buckets: buckets,
                    num_seqs_buckets: shapes.1,
                    max_prefills_per_batch: Some(phases.2),
                    kv_admission: longest_rule.then(|| "max_model_len".to_owned()),
                    max_consecutive_prefill_steps: phases.0,
                    min_decode_steps: Some(phases.1),
                    chunking: chunking.0.then(|| "bucket".to_owned()),
                    long_prefill_token_threshold: Some(threshold),
                    prefix_caching: Some(prefix_caching),
                    policy: priority.then(|| "priority".to_owned()),
                    lookahead: Some(lookahead),
                    ..RawConfig::default()
                };
                (scale, Config::resolve(&raw).expect("a valid configuration"))
            })
        })
    })
}

pub(crate) fn prompts(scale: Scale, length_max: u32) -> BoxedStrategy<Prompt> {
    let lengths = prop_oneof![4 => 1..=length_max.div_ceil(3), 3 => 1..=length_max, 1 => Just(length_max + 1)].boxed();
    let length = lengths.clone().prop_map(Prompt::Length);
    let tail = proptest::collection::vec(0..2_u32, 0..3);
    let tokens = (0..SEQUENCES, lengths.clone(), tail).prop_map(|(sequence, length, tail)| {
        let ids = (0..length).map(|at| if at + 3 < length { sequence * at % 2 } else { sequence % 2 });
        let kept = length as usize - tail.len().min(length as usize - 1);
        Prompt::Tokens(ids.take(kept).chain(tail).take(length as usize).collect())
    });
    let segments = (lengths, proptest::collection::vec(0..2_u64, 4)).prop_map(|(length, ids)| Prompt::Segments {
        ids: ids.into_iter().take(length.div_ceil(SEGMENT_TOKENS) as usize).collect(),
        length,
    });
    if scale.block_max == SMALL.block_max {
        prop_oneof![2 => length, 6 => tokens, 1 => segments].boxed()
    } else {
        prop_oneof![1 => length, 4 => segments].boxed()
    }
}
