//! How many tokens of a prompt the next step takes.

use crate::config::{Buckets, Chunking, Config, common_divisor};

/// Cost of one more call of the compiled graph, in padded tokens, where no cost table is given.
const CALL_COST_TOKENS: f64 = 256.0;

/// Costs are compared to six decimal places, as whole numbers, so that equal sums are equal.
const COST_SCALE: f64 = 1e6;

/// Cuts prompts into chunks.
#[derive(Clone, Debug)]
pub struct Chunker {
    budget: u32,
    threshold: u32,
    /// Tokens of which each request has its share, whatever the threshold.
    shared: Option<u32>,
    plan: Option<Plan>,
}

impl Chunker {
    /// The rule of `config`.
    pub fn new(config: &Config) -> Self {
        let plan = match config.chunking {
            Chunking::Fixed => None,
            Chunking::Bucket => Some(Plan::new(&config.num_batched_tokens_buckets, config.prefill_cost.as_deref())),
        };
        Self { budget: config.prefill_budget(), threshold: config.long_prefill_token_threshold, shared: None, plan }
    }

    /// Never caps a chunk below an even share of `tokens` among all requests (vLLM's adaptive threshold).
    #[must_use]
    pub fn with_share_of(self, tokens: u32) -> Self {
        Self { shared: Some(tokens), ..self }
    }

    /// Tokens of the next chunk of a prompt of which `rest` are to be computed, at least 1. `requests` run or
    /// wait, itself included: with others there the cap on long prompts applies.
    pub fn chunk(&mut self, rest: u32, requests: usize) -> u32 {
        let chunk = self.plan.as_mut().map_or(rest.min(self.budget), |plan| plan.chunk(rest));
        self.cap(requests).map_or(chunk, |cap| chunk.min(cap))
    }

    /// Whether prompts that have `sum` tokens to compute together may share a step.
    pub fn packs(&self, sum: u64, requests: usize) -> bool {
        sum <= u64::from(self.budget) && self.cap(requests).is_none()
    }

    fn cap(&self, requests: usize) -> Option<u32> {
        let share = |tokens: u32| u32::try_from(tokens as usize / requests).expect("a share of 32 bits");
        (self.threshold > 0 && requests > 1).then(|| self.threshold.max(self.shared.map_or(0, share)))
    }
}

/// The prompts that share one prefill step: the first whatever its length, others as long as all of them fit
/// whole.
#[derive(Clone, Copy, Debug)]
pub struct Pack {
    prompts_max: u32,
    prompts: u32,
    tokens: u64,
}

impl Pack {
    /// None yet, at most `prompts_max`.
    pub fn new(prompts_max: u32) -> Self {
        Self { prompts_max, prompts: 0, tokens: 0 }
    }

    /// Takes in a prompt of which `rest` tokens are to be computed; `false`, and nothing changed, when it does
    /// not fit.
    pub fn add(&mut self, chunker: &Chunker, rest: u32, requests: usize) -> bool {
        let fits = self.fits(chunker, rest, requests);
        if fits {
            self.prompts += 1;
            self.tokens += u64::from(rest);
        }
        fits
    }

    /// Whether [`Pack::add`] would take it in.
    pub fn fits(&self, chunker: &Chunker, rest: u32, requests: usize) -> bool {
        let more = self.prompts < self.prompts_max && chunker.packs(self.tokens + u64::from(rest), requests);
        self.prompts == 0 || more
    }

    /// Lets a prompt go that was taken in.
    pub fn remove(&mut self, rest: u32) {
        self.prompts -= 1;
        self.tokens -= u64::from(rest);
    }

    /// Prompts taken in.
    pub fn prompts(&self) -> u32 {
        self.prompts
    }
}

/// The cheapest split of a prompt into full buckets and one last chunk, for every length.
///
/// Exact, by dynamic programming: the best split of a rest is its first chunk and the best split of what
/// is left. All buckets are multiples of their common divisor, so two rests that round up to the same
/// multiple of it have the same best split but for the last chunk; the table has one entry a multiple,
/// and grows to the longest prompt that was asked for.
#[derive(Clone, Debug)]
struct Plan {
    /// Bucket and cost of a call, ascending.
    calls: Vec<(u32, u128)>,
    unit: u32,
    /// Entry `i`: the best split of `i * unit` tokens.
    best: Vec<Split>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    cost: u128,
    calls: u32,
    /// Bucket of the first chunk.
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

    fn chunk(&mut self, rest: u32) -> u32 {
        let at = rest.div_ceil(self.unit) as usize;
        while self.best.len() <= at {
            self.grow();
        }
        self.best[at].first.min(rest)
    }

    /// Adds the entry after the last one.
    fn grow(&mut self) {
        let at = self.best.len();
        let better = |a: Split, b: Split| (a.cost, a.calls, b.first) < (b.cost, b.calls, a.first);
        let mut best: Option<Split> = None;
        for &(size, cost) in &self.calls {
            // A bucket that holds all of the rest ends the prompt; a larger one could only be dearer by
            // an odd cost table, and then the smallest that fits is still what the step is padded to.
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
        self.best.push(best.expect("there is a bucket"));
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
    fn fixed_takes_what_the_budget_leaves() {
        let mut fixed = Chunker { budget: 2048, threshold: 0, shared: None, plan: None };
        assert_eq!(split(&mut fixed, 10_000), [2048, 2048, 2048, 2048, 1808]);
    }

    #[test]
    fn bucket_splits_where_it_is_cheaper() {
        let mut chunker = planned(&[128, 256, 512, 1024, 2048, 4096, 8192], None);
        assert_eq!(split(&mut chunker, 5000), [4096, 904]);
        assert_eq!(split(&mut chunker, 8192), [8192]);
        assert_eq!(split(&mut chunker, 8000), [8000]);
        assert_eq!(split(&mut chunker, 1), [1]);
    }

    #[test]
    fn v09_the_cap_holds_while_others_are_there() {
        let mut capped = Chunker { budget: 512, threshold: 128, shared: None, plan: None };
        assert_eq!((capped.chunk(400, 2), capped.chunk(400, 1), capped.chunk(16, 2)), (128, 400, 16));
        assert!(!capped.packs(10, 2) && capped.packs(512, 1) && !capped.packs(513, 1));
        let mut shared = capped.with_share_of(512);
        assert_eq!([1, 2, 3, 4, 5].map(|requests| shared.chunk(400, requests)), [400, 256, 170, 128, 128]);
    }

    #[test]
    fn the_first_prompt_is_packed_whatever_its_length() {
        let chunker = Chunker { budget: 100, threshold: 0, shared: None, plan: None };
        let mut pack = Pack::new(3);
        assert!(pack.add(&chunker, 400, 9) && !pack.add(&chunker, 1, 9));
        pack.remove(400);
        let added = [40, 40, 30, 20, 1].map(|rest| pack.add(&chunker, rest, 9));
        assert_eq!((added, pack.prompts()), ([true, true, false, true, false], 3));
    }

    /// Every split there is, best first by the rule's own words.
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
    fn bucket_is_exact() {
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
