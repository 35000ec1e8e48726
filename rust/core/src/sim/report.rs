//! The result of a replay.

use super::counters::{Bucket, Counters};
use super::distribution::{Distribution, milliseconds, seconds};
use super::refusal::Refusal;
use super::steps::Steps;

/// The times of one request, in nanoseconds from time zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Arrival.
    pub arrival: u64,
    /// Start of the first step that scheduled the request; `None` if the request was refused.
    pub start: Option<u64>,
    /// End of the step that emitted the first token; `None` if the request was refused.
    pub first_token: Option<u64>,
    /// End of the step that emitted the last token; `None` if the request was refused.
    pub end: Option<u64>,
    /// Number of generated tokens.
    pub outputs: u32,
    /// Why the request was refused; `None` if it completed.
    pub refusal: Option<Refusal>,
}

impl Record {
    /// Return the time from time zero to the arrival, in seconds.
    pub fn arrival_s(&self) -> f64 {
        seconds(self.arrival)
    }

    /// Return the time from the arrival to the first token, in seconds.
    pub fn ttft_s(&self) -> Option<f64> {
        Some(seconds(self.first_token? - self.arrival))
    }

    /// Return the time from the arrival to the last token, in seconds.
    pub fn e2e_s(&self) -> Option<f64> {
        Some(seconds(self.end? - self.arrival))
    }

    /// Return the mean inter-token latency in seconds; `None` for fewer than two tokens.
    pub fn mean_itl_s(&self) -> Option<f64> {
        let gaps = self.outputs.checked_sub(1).filter(|&gaps| gaps > 0)?;
        Some(seconds(self.end? - self.first_token?) / f64::from(gaps))
    }
}

/// Number of steps by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCounts {
    /// Steps that compute prompt tokens.
    pub prefill: u64,
    /// Steps that only decode.
    pub decode: u64,
}

/// Number of tokens over all steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCounts {
    /// Prompt tokens computed, unpadded.
    pub prompt: u64,
    /// Prompt tokens computed, padded.
    pub prompt_padded: u64,
    /// Decode rows of decode steps, unpadded; one token each.
    pub decode: u64,
    /// Decode rows of decode steps, padded.
    pub decode_padded: u64,
}

/// Figures of the whole workload. Times are over completed requests; `None` if there is nothing to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Number of requests that completed.
    pub completed: u64,
    /// Number of requests that were refused.
    pub rejected: u64,
    /// Time from time zero to the end of the last step, in seconds.
    pub makespan_s: f64,
    /// Completed requests per second of the makespan.
    pub requests_per_s: Option<f64>,
    /// Generated tokens per second of the makespan.
    pub output_tokens_per_s: Option<f64>,
    /// Time from arrival to first token, in milliseconds.
    pub ttft_ms: Option<Distribution>,
    /// Inter-token latency over all tokens of all requests, in milliseconds.
    pub itl_ms: Option<Distribution>,
    /// Time from arrival to last token, in milliseconds.
    pub e2e_ms: Option<Distribution>,
    /// Time from arrival to the start of the first step that scheduled the request, in milliseconds.
    pub queue_ms: Option<Distribution>,
    /// Number of steps by kind.
    pub steps: StepCounts,
    /// Number of tokens, unpadded and padded.
    pub tokens: TokenCounts,
    /// Prefill steps by token bucket, ascending; empty if steps are not padded.
    pub prefill_padding: Vec<(u32, Bucket)>,
    /// Decode steps by batch bucket, ascending; empty if steps are not padded.
    pub decode_padding: Vec<(u32, Bucket)>,
    /// Time that the head of the waiting queue waited, by reason, in milliseconds.
    pub wait_reasons_ms: Vec<(&'static str, f64)>,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Figures of the whole workload.
    pub summary: Summary,
    /// Times of each request, in the order of the workload.
    pub records: Vec<Record>,
    /// Positions in the workload of the refused requests, in order of arrival.
    pub refused: Vec<u32>,
    /// Every step; `None` if steps were not recorded.
    pub steps: Option<Steps>,
}

impl Summary {
    pub(super) fn new(records: &[Record], refused: u64, makespan: u64, counters: Counters) -> Self {
        let completed = records.len() as u64 - refused;
        let outputs: u64 = records.iter().filter(|record| record.end.is_some()).map(|r| u64::from(r.outputs)).sum();
        let times_to = |event: fn(&Record) -> Option<u64>| {
            let time = |record: &Record| Some(event(record)? - record.arrival);
            Distribution::of(&mut records.iter().filter_map(time).collect::<Vec<_>>())
        };
        let prefill_padding = counters.prefill_buckets.into_sizes();
        let waits = counters.waits.into_sorted();
        Self {
            completed,
            rejected: refused,
            makespan_s: seconds(makespan),
            requests_per_s: per_second(completed, makespan),
            output_tokens_per_s: per_second(outputs, makespan),
            ttft_ms: times_to(|record| record.first_token),
            itl_ms: Distribution::of_counts(&counters.gaps.into_counts()),
            e2e_ms: times_to(|record| record.end),
            queue_ms: times_to(|record| record.start),
            steps: StepCounts { prefill: counters.prefill_steps, decode: counters.decode_steps },
            tokens: TokenCounts {
                prompt: counters.prompt,
                prompt_padded: counters.prompt_padded,
                decode: counters.decode,
                decode_padded: counters.decode_padded,
            },
            prefill_padding,
            decode_padding: counters.decode_buckets.into_sizes(),
            wait_reasons_ms: waits.into_iter().map(|(reason, time)| (reason, milliseconds(time))).collect(),
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a rate")]
fn per_second(count: u64, makespan: u64) -> Option<f64> {
    (makespan > 0).then(|| count as f64 / seconds(makespan))
}
