//! The first chunk of the cheapest split of a prompt, found by comparing all splits.

use std::collections::BTreeMap;

use neuron_sched_core::config::Config;

use super::fit;

/// Cost, number of calls, and the negated chunks. The smallest is the best split.
type Split = (i64, usize, Vec<i64>);

pub(crate) fn first(rest: u32, config: &Config) -> u32 {
    let sizes = config.num_batched_tokens_buckets.sizes();
    let costs: BTreeMap<u32, i64> = match &config.prefill_cost {
        #[allow(clippy::cast_possible_truncation, reason = "the costs of these tests are small integers")]
        Some(table) => table.iter().map(|&(size, cost)| (size, cost as i64)).collect(),
        None => sizes.iter().map(|&size| (size, i64::from(size) + 256)).collect(),
    };
    let (_, _, chunks) = best(rest, sizes, &costs, &mut BTreeMap::new());
    u32::try_from(-chunks[0]).unwrap()
}

fn best(rest: u32, sizes: &[u32], costs: &BTreeMap<u32, i64>, known: &mut BTreeMap<u32, Split>) -> Split {
    if let Some(split) = known.get(&rest) {
        return split.clone();
    }
    let mut splits = Vec::new();
    if rest <= sizes[sizes.len() - 1] {
        splits.push((costs[&fit(sizes, rest)], 1, vec![-i64::from(rest)]));
    }
    for &size in sizes.iter().filter(|&&size| size < rest) {
        let (cost, calls, chunks) = best(rest - size, sizes, costs, known);
        splits.push((costs[&size] + cost, calls + 1, [vec![-i64::from(size)], chunks].concat()));
    }
    let split = splits.into_iter().min().unwrap();
    known.insert(rest, split.clone());
    split
}
