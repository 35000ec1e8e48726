//! What came out of a replay.

use super::spread::{Spread, milliseconds, seconds};
use super::steps::Steps;
use super::tally::{Bucket, Tally};
use crate::error::Error;

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its prompt is longer than the model takes.
    PromptTooLong,
    /// Its worst case is larger than the whole KV cache.
    KvNeverFits,
}

impl Refusal {
    /// The stable name, for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::PromptTooLong => "prompt_too_long",
            Self::KvNeverFits => "kv_never_fits",
        }
    }

    /// The refusal that `error` stands for, or the error itself.
    pub(super) fn of(error: Error) -> Result<Self, Error> {
        match error {
            Error::PromptTooLong { .. } => Ok(Self::PromptTooLong),
            Error::NeverFits { .. } => Ok(Self::KvNeverFits),
            other => Err(other),
        }
    }
}

/// One request; times in nanoseconds from time zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Its arrival.
    pub arrival: u64,
    /// Start of the first step that scheduled it; `None` when it was refused.
    pub start: Option<u64>,
    /// End of the step that gave its first token.
    pub first_token: Option<u64>,
    /// End of the step that gave its last token.
    pub end: Option<u64>,
    /// Tokens that it generated.
    pub outputs: u32,
    /// Why it was refused.
    pub refusal: Option<Refusal>,
}

impl Record {
    /// Seconds from time zero to its arrival.
    pub fn arrival_s(&self) -> f64 {
        seconds(self.arrival)
    }

    /// Seconds from its arrival to its first token.
    pub fn ttft_s(&self) -> Option<f64> {
        Some(seconds(self.first_token? - self.arrival))
    }

    /// Seconds from its arrival to its last token.
    pub fn e2e_s(&self) -> Option<f64> {
        Some(seconds(self.end? - self.arrival))
    }

    /// Mean seconds between its tokens; `None` when there are not two.
    pub fn mean_itl_s(&self) -> Option<f64> {
        let gaps = self.outputs.checked_sub(1).filter(|&gaps| gaps > 0)?;
        Some(seconds(self.end? - self.first_token?) / f64::from(gaps))
    }
}

/// Steps by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCounts {
    /// Steps with prompt tokens.
    pub prefill: u64,
    /// Steps without.
    pub decode: u64,
}

/// Tokens over all steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCounts {
    /// Prompt tokens computed.
    pub prompt: u64,
    /// The same, as padded.
    pub prompt_padded: u64,
    /// Rows of decode steps, one token each.
    pub decode: u64,
    /// The same, as padded.
    pub decode_padded: u64,
}

/// The workload as a whole. Times over completed requests; `None` where nothing is to be measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Requests that ran to their end.
    pub completed: u64,
    /// Requests that were refused.
    pub rejected: u64,
    /// Time zero to the end of the last step.
    pub makespan_s: f64,
    /// Completed requests by makespan.
    pub requests_per_s: Option<f64>,
    /// Generated tokens by makespan.
    pub output_tokens_per_s: Option<f64>,
    /// Arrival to first token.
    pub ttft_ms: Option<Spread>,
    /// All gaps between the tokens of a request, of all requests.
    pub itl_ms: Option<Spread>,
    /// Arrival to last token.
    pub e2e_ms: Option<Spread>,
    /// Arrival to the start of the first step that scheduled the request.
    pub queue_ms: Option<Spread>,
    /// Steps by kind.
    pub steps: StepCounts,
    /// Tokens, real and padded.
    pub tokens: TokenCounts,
    /// Prefill steps by padded tokens, ascending; empty where nothing is padded.
    pub prefill_padding: Vec<(u32, Bucket)>,
    /// Decode steps by padded rows, ascending; empty where nothing is padded.
    pub decode_padding: Vec<(u32, Bucket)>,
    /// How long the head of the waiting queue waited, by reason, in milliseconds.
    pub wait_reasons_ms: Vec<(&'static str, f64)>,
}

/// Everything that a replay found out.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The workload as a whole.
    pub summary: Summary,
    /// Each request, in the order of the workload.
    pub records: Vec<Record>,
    /// The refused requests as places in the workload, in order of arrival.
    pub refused: Vec<u32>,
    /// Each step, where that was asked for.
    pub steps: Option<Steps>,
}

impl Summary {
    pub(super) fn new(records: &[Record], refused: u64, makespan: u64, tally: Tally) -> Self {
        let completed = records.len() as u64 - refused;
        let outputs: u64 = records.iter().filter(|record| record.end.is_some()).map(|r| u64::from(r.outputs)).sum();
        let spread = |until: fn(&Record) -> Option<u64>| {
            let time = |record: &Record| Some(until(record)? - record.arrival);
            Spread::of(&mut records.iter().filter_map(time).collect::<Vec<_>>())
        };
        let prefill_padding = tally.prefill_buckets.into_sizes();
        let waits = tally.waits.into_sorted();
        Self {
            completed,
            rejected: refused,
            makespan_s: seconds(makespan),
            requests_per_s: per_second(completed, makespan),
            output_tokens_per_s: per_second(outputs, makespan),
            ttft_ms: spread(|record| record.first_token),
            itl_ms: Spread::of_counts(&tally.gaps.into_counts()),
            e2e_ms: spread(|record| record.end),
            queue_ms: spread(|record| record.start),
            steps: StepCounts { prefill: tally.prefill_steps, decode: tally.decode_steps },
            tokens: TokenCounts {
                prompt: tally.prompt,
                prompt_padded: tally.prompt_padded,
                decode: tally.decode,
                decode_padded: tally.decode_padded,
            },
            prefill_padding,
            decode_padding: tally.decode_buckets.into_sizes(),
            wait_reasons_ms: waits.into_iter().map(|(reason, time)| (reason, milliseconds(time))).collect(),
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a rate")]
fn per_second(count: u64, makespan: u64) -> Option<f64> {
    (makespan > 0).then(|| count as f64 / seconds(makespan))
}
