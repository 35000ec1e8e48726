//! Counters of a replay. All are whole numbers.

use super::engine::Decision;
use crate::fixed_map::FixedMap;

/// The steps that were padded to one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    /// Number of steps.
    pub steps: u64,
    /// Number of tokens or rows, unpadded.
    pub real: u64,
    /// Number of tokens or rows, padded.
    pub padded: u64,
}

/// Counters over all steps.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub prefill_steps: u64,
    pub decode_steps: u64,
    pub prompt: u64,
    pub prompt_padded: u64,
    pub decode: u64,
    pub decode_padded: u64,
    pub prefill_buckets: Buckets,
    pub decode_buckets: Buckets,
    pub gaps: Gaps,
    pub waits: Waits,
}

impl Counters {
    /// Count `times` identical steps of `time` nanoseconds each; the first starts at `start`.
    pub(super) fn step(&mut self, decision: Decision, pads: bool, (start, time, times): (u64, u64, u64)) {
        let Decision { prompt, prompt_padded, decodes, decodes_padded } = decision;
        if decision.is_prefill() {
            self.prefill_steps += times;
            self.prompt += u64::from(prompt) * times;
            self.prompt_padded += u64::from(prompt_padded) * times;
            if pads {
                self.prefill_buckets.add(prompt_padded, times, prompt);
            }
        } else {
            self.decode_steps += times;
            self.decode += u64::from(decodes) * times;
            self.decode_padded += u64::from(decodes_padded) * times;
            if pads {
                self.decode_buckets.add(decodes_padded, times, decodes);
            }
        }
        if decodes > 0 {
            self.gaps.decode(decodes.into(), (start, time, times));
        }
    }
}

/// Steps by padded size, ascending.
#[derive(Debug, Default)]
pub(super) struct Buckets {
    sizes: Vec<(u32, Bucket)>,
    /// Index of the size of the last step: consecutive steps mostly have the same size.
    last: usize,
}

impl Buckets {
    fn add(&mut self, size: u32, steps: u64, real: u32) {
        if self.sizes.get(self.last).is_none_or(|&(known, _)| known != size) {
            let found = self.sizes.binary_search_by_key(&size, |&(known, _)| known);
            self.last = found.unwrap_or_else(|at| {
                self.sizes.insert(at, (size, Bucket::default()));
                at
            });
        }
        let bucket = &mut self.sizes[self.last].1;
        bucket.steps += steps;
        bucket.real += u64::from(real) * steps;
        bucket.padded += u64::from(size) * steps;
    }

    pub(super) fn into_sizes(self) -> Vec<(u32, Bucket)> {
        self.sizes
    }
}

/// Inter-token gaps of all requests, each with its number of occurrences.
///
/// A step that decodes at all decodes every request that has its first token. Requests that decoded in the previous
/// such step therefore share one gap; only requests with a first token since then have a gap of their own.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    counts: FixedMap<u64>,
    /// End of the last step with decode rows.
    last: u64,
    /// Times of the first tokens of requests that have not decoded yet.
    first_tokens: Vec<u64>,
}

impl Gaps {
    /// Count the first token, at time `at`, of a request that has more tokens to generate.
    pub(super) fn first_token(&mut self, at: u64) {
        self.first_tokens.push(at);
    }

    fn decode(&mut self, rows: u64, (start, time, times): (u64, u64, u64)) {
        let end = start + time;
        debug_assert!(self.first_tokens.len() as u64 <= rows, "a request with its first token decodes next");
        count(&mut self.counts, end - self.last, rows - self.first_tokens.len() as u64);
        for first in self.first_tokens.drain(..) {
            count(&mut self.counts, end - first, 1);
        }
        count(&mut self.counts, time, rows * (times - 1));
        self.last = start + time * times;
    }

    /// Return the gaps in nanoseconds, ascending, with their numbers of occurrences.
    pub(super) fn into_counts(self) -> Vec<(u64, u64)> {
        let mut counts: Vec<(u64, u64)> = self.counts.into_iter().collect();
        counts.sort_unstable();
        counts
    }
}

fn count(counts: &mut FixedMap<u64>, gap: u64, times: u64) {
    if times > 0 {
        *counts.entry(gap).or_default() += times;
    }
}

/// Time that the head of the waiting queue waited, by reason, in order of first occurrence.
#[derive(Debug, Default)]
pub(super) struct Waits(Vec<(&'static str, u64)>);

impl Waits {
    pub(super) fn add(&mut self, reason: &'static str, time: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, total)) => *total += time,
            None => self.0.push((reason, time)),
        }
    }

    /// Return the times, sorted by reason.
    pub(super) fn into_sorted(mut self) -> Vec<(&'static str, u64)> {
        self.0.sort_unstable();
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_decode_together_share_a_gap() {
        let mut gaps = Gaps::default();
        gaps.first_token(100);
        gaps.decode(1, (100, 10, 3));
        gaps.first_token(230);
        gaps.first_token(240);
        gaps.decode(3, (240, 10, 2));
        assert_eq!(gaps.into_counts(), [(10, 7), (20, 1), (120, 1)]);
    }
}
