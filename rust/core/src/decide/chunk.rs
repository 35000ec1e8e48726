//! The number of prompt tokens that the next step computes.

use crate::config::{Buckets, Chunking, Config, common_divisor};

/// Fixed cost of a call of the compiled graph, in padded tokens, if no cost table is configured.
const CALL_COST_TOKENS: f64 = 256.0;

/// Costs are compared as integers in units of 1e-6: sums of floats that should be equal may differ.
const COST_SCALE: f64 = 1e6;

/// Splits prompts into chunks.
#[derive(Clone, Debug)]
pub struct Chunker {
    budget: u32,
    threshold: u32,
    /// Tokens of a step; the threshold is never below an even share of them per request.
    shared: Option<u32>,
    /// Cheapest splits, with `chunking` `bucket`.
    plan: Option<Plan>,
}

impl Chunker {
    /// Return the rule of `config`.
    pub fn new(config: &Config) -> Self {
        let plan = match config.chunking {
            Chunking::Fixed => None,
            Chunking::Bucket => Some(Plan::new(&config.num_batched_tokens_buckets, config.prefill_cost.as_deref())),
        };
        Self { budget: config.prefill_budget(), threshold: config.long_prefill_token_threshold, shared: None, plan }
    }

    /// Never cap a chunk below an even share of `tokens` among all requests (vLLM's adaptive threshold).
    #[must_use]
    pub fn with_share_of(self, tokens: u32) -> Self {
        Self { shared: Some(tokens), ..self }
    }

    /// Return the token count of the next chunk of a prompt with `rest` tokens to compute, at least 1.
    ///
    /// `num_requests` is the number of running and waiting requests, including this one. If there are others,
    /// `long_prefill_token_threshold` applies.
    pub fn chunk(&mut self, rest: u32, num_requests: usize) -> u32 {
        let chunk = self.plan.as_mut().map_or(rest.min(self.budget), |plan| plan.chunk(rest));
        self.cap(num_requests).map_or(chunk, |cap| chunk.min(cap))
    }

    /// Whether several prompts with `sum` tokens to compute in total fit one step.
    pub fn packs(&self, sum: u64, num_requests: usize) -> bool {
        sum <= u64::from(self.budget) && self.cap(num_requests).is_none()
    }

    /// Return the most tokens of a chunk, if the long-prefill threshold applies.
    fn cap(&self, num_requests: usize) -> Option<u32> {
        let share = |tokens: u32| u32::try_from(tokens as usize / num_requests).expect("a share of 32 bits");
        (self.threshold > 0 && num_requests > 1).then(|| self.threshold.max(self.shared.map_or(0, share)))
    }
}

/// The prompts of one prefill step. The first prompt has any length; more prompts are added while all of them fit in
/// full.
#[derive(Clone, Copy, Debug)]
pub struct Pack {
    prompts_max: u32,
    prompts: u32,
    tokens: u64,
}

impl Pack {
    /// Return an empty step for at most `prompts_max` prompts.
    pub fn new(prompts_max: u32) -> Self {
        Self { prompts_max, prompts: 0, tokens: 0 }
    }

    /// Add a prompt with `rest` tokens to compute. Returns `false` if the step's token or row capacity is exhausted.
    pub fn add(&mut self, chunker: &Chunker, rest: u32, num_requests: usize) -> bool {
        let fits = self.fits(chunker, rest, num_requests);
        if fits {
            self.prompts += 1;
            self.tokens += u64::from(rest);
        }
        fits
    }

    /// Whether [`Pack::add`] would add the prompt.
    pub fn fits(&self, chunker: &Chunker, rest: u32, num_requests: usize) -> bool {
        let more = self.prompts < self.prompts_max && chunker.packs(self.tokens + u64::from(rest), num_requests);
        self.prompts == 0 || more
    }

    /// Remove a prompt that was added with `rest` tokens to compute.
    pub fn remove(&mut self, rest: u32) {
        self.prompts -= 1;
        self.tokens -= u64::from(rest);
    }

    /// Number of prompts in the step.
    pub fn prompts(&self) -> u32 {
        self.prompts
    }
}

/// The cheapest split of a prompt into full buckets and one last chunk, for every length.
///
/// Computed by dynamic programming: the best split of `n` tokens is a first chunk and the best split of the others. All
/// buckets are multiples of their common divisor, the unit. Two lengths that round up to the same multiple of the unit
/// have the same best split except for the size of the last chunk. So the table has one entry per multiple, and it
/// grows to the longest prompt so far.
#[derive(Clone, Debug)]
struct Plan {
    /// Bucket, in tokens, and cost of a call, by ascending bucket.
    calls: Vec<(u32, u128)>,
    unit: u32,
    /// Entry `i` is the best split of `i * unit` tokens.
    best: Vec<Split>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    cost: u128,
    calls: u32,
    /// Bucket of the first chunk, in tokens.
    first: u32,
}

impl Plan {
    fn new(buckets: &Buckets, costs: Option<&[(u32, f64)]>) -> Self {
        let cost = |size: u32| {
            let given = costs.and_then(|costs| costs.iter().find(|&&(padded, _)| padded == size));
            let cost = given.map_or(f64::from(size) + CALL_COST_TOKENS, |&(_, cost)| cost);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked: 0 to 1e9")]
            let scaled = (cost * COST_SCALE).round() as u128;
            scaled
        };
        let calls = buckets.sizes().iter().map(|&size| (size, cost(size))).collect();
        Self { calls, unit: common_divisor(buckets), best: vec![Split { cost: 0, calls: 0, first: 0 }] }
    }

    /// Return the first chunk of the best split of `rest` tokens.
    fn chunk(&mut self, rest: u32) -> u32 {
        let at = rest.div_ceil(self.unit) as usize;
        while self.best.len() <= at {
            self.grow();
        }
        self.best[at].first.min(rest)
    }

    /// Add one entry to the table.
    fn grow(&mut self) {
        let at = self.best.len();
        let better = |a: Split, b: Split| (a.cost, a.calls, b.first) < (b.cost, b.calls, a.first);
        let mut best: Option<Split> = None;
        for &(size, cost) in &self.calls {
            // The smallest bucket that fits all tokens is the last candidate: the step is padded to it even if a cost
            // table makes a larger bucket cheaper.
            let left = at.saturating_sub((size / self.unit) as usize);
            let rest = self.best[left];
            let split = Split { cost: cost + rest.cost, calls: rest.calls + 1, first: size };
            if best.is_none_or(|best| better(split, best)) {
                best = Some(split);
            }
            if left == 0 {
                break;
            }
        }
        self.best.push(best.expect("at least one bucket"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunker: &mut Chunker, mut rest: u32) -> Vec<u32> {
        let mut chunks = Vec::new();
        while rest > 0 {
            chunks.push(chunker.chunk(rest, 1));
            rest -= chunks[chunks.len() - 1];
        }
        chunks
    }

    fn planned(sizes: &[i64], costs: Option<&[(u32, f64)]>) -> Chunker {
        let buckets = Buckets::new("buckets", sizes, None).unwrap();
        Chunker { budget: buckets.last(), threshold: 0, shared: None, plan: Some(Plan::new(&buckets, costs)) }
    }

    #[test]
    fn fixed_chunks_fill_the_budget() {
        let mut fixed = Chunker { budget: 2048, threshold: 0, shared: None, plan: None };
        assert_eq!(split(&mut fixed, 10_000), [2048, 2048, 2048, 2048, 1808]);
    }

    #[test]
    fn bucket_chunks_split_a_prompt_if_that_is_cheaper() {
        let mut chunker = planned(&[128, 256, 512, 1024, 2048, 4096, 8192], None);
        assert_eq!(split(&mut chunker, 5000), [4096, 904]);
        assert_eq!(split(&mut chunker, 8192), [8192]);
        assert_eq!(split(&mut chunker, 8000), [8000]);
        assert_eq!(split(&mut chunker, 1), [1]);
    }

    #[test]
    fn v09_the_threshold_applies_while_there_are_other_requests() {
        let mut capped = Chunker { budget: 512, threshold: 128, shared: None, plan: None };
        assert_eq!((capped.chunk(400, 2), capped.chunk(400, 1), capped.chunk(16, 2)), (128, 400, 16));
        assert!(!capped.packs(10, 2) && capped.packs(512, 1) && !capped.packs(513, 1));
        let mut shared = capped.with_share_of(512);
        assert_eq!([1, 2, 3, 4, 5].map(|num_requests| shared.chunk(400, num_requests)), [400, 256, 170, 128, 128]);
    }

    #[test]
    fn the_first_prompt_is_packed_at_any_length() {
        let chunker = Chunker { budget: 100, threshold: 0, shared: None, plan: None };
        let mut pack = Pack::new(3);
        assert!(pack.add(&chunker, 400, 9) && !pack.add(&chunker, 1, 9));
        pack.remove(400);
        let added = [40, 40, 30, 20, 1].map(|rest| pack.add(&chunker, rest, 9));
        assert_eq!((added, pack.prompts()), ([true, true, false, true, false], 3));
    }

    /// Return cost, calls and chunks of the best of all splits: lowest cost, then fewest calls, then largest first
    /// chunks.
    fn exhaustive(rest: u32, calls: &[(u32, u128)]) -> (u128, usize, Vec<u32>) {
        let last = calls.iter().find(|&&(size, _)| size >= rest).map(|&(_, cost)| (cost, 1, vec![rest]));
        let more = calls.iter().filter(|&&(size, _)| size < rest).map(|&(size, cost)| {
            let (left, calls_left, mut chunks) = exhaustive(rest - size, calls);
            chunks.insert(0, size);
            (cost + left, calls_left + 1, chunks)
        });
        let key = |(cost, count, chunks): &(u128, usize, Vec<u32>)| {
            (*cost, *count, chunks.iter().map(|&chunk| u32::MAX - chunk).collect::<Vec<_>>())
        };
        last.into_iter().chain(more).min_by_key(key).unwrap()
    }

    #[test]
    fn bucket_chunks_equal_an_exhaustive_search() {
        let lists: [&[i64]; 4] = [&[4, 8, 16], &[3, 5, 11], &[6, 9, 20], &[7]];
        for sizes in lists {
            for costs in [[5.0, 6.0, 6.5], [1.0, 2.0, 4.0], [3.0, 1.0, 2.0], [2.0, 2.0, 2.0]] {
                let table: Vec<(u32, f64)> =
                    sizes.iter().zip(costs).map(|(&size, cost)| (u32::try_from(size).unwrap(), cost)).collect();
                let mut chunker = planned(sizes, Some(&table));
                let calls = chunker.plan.as_ref().unwrap().calls.clone();
                for rest in 1..45 {
                    assert_eq!(split(&mut chunker, rest), exhaustive(rest, &calls).2, "{sizes:?} {costs:?} {rest}");
                }
            }
        }
    }
}
