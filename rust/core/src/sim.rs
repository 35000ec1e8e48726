//! Replay of a workload on a virtual clock: the real schedulers decide, a [`Cost`] says how long each
//! step takes, and nothing sleeps.
//!
//! Times are whole nanoseconds from the earliest arrival. Requests that arrive together are served in the
//! order in which they are given, one that arrives at the very end of a step is seen by the next decision,
//! and idle time is jumped over. So is a run of decode steps that are certain to be equal; what comes out
//! is the same as if each had been taken by itself.
//!
//! Rejected: a clock in floats (ties between an arrival and the end of a step would depend on rounding),
//! and a list of all gaps between tokens (equal gaps are counted instead).

mod drive;
mod engine;
mod exclusive;
mod mixed;
mod report;
mod spread;
mod steps;
mod tally;

use std::ops::ControlFlow;

use crate::config::Config;
use crate::cost::Cost;
use crate::error::Error;
use crate::request::Prompt;

pub use report::{Bucket, Record, Refusal, Report, StepCounts, Summary, TokenCounts};
pub use spread::Spread;
pub use steps::{Entry, Recorded, Steps};

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When it arrives, in nanoseconds; only differences matter.
    pub at: u64,
    /// Its prompt, at least one token.
    pub prompt: Prompt,
    /// Tokens that it generates, at least 1, unless the model length ends it earlier.
    pub outputs: u32,
    /// Its priority, for the policy of that name: lower numbers first.
    pub priority: i64,
}

impl Arrival {
    /// Tokens that it generates when a sequence may have `max_model_len`.
    fn capped(&self, max_model_len: u32) -> u32 {
        self.outputs.min(max_model_len.saturating_sub(self.prompt.len()).max(1))
    }
}

/// Which scheduler decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduler {
    /// [`crate::exclusive::ExclusiveScheduler`], with the configuration as it is.
    Bucket,
    /// [`crate::mixed::MixedScheduler`], with `max_num_batched_tokens` as its budget and
    /// `num_blocks * block_size` KV tokens; nothing is padded.
    Mixed,
}

impl Scheduler {
    /// The scheduler of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "bucket" => Some(Self::Bucket),
            "mixed" => Some(Self::Mixed),
            _ => None,
        }
    }
}

/// How to replay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Keep every step for [`Report::steps`].
    pub record_steps: bool,
    /// Take equal decode steps one by one; the report is the same, only later.
    pub one_by_one: bool,
}

/// How far a replay is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Requests that completed or were refused.
    pub done: usize,
    /// Requests of the workload.
    pub total: usize,
}

/// Runs `workload` to its end, and calls `observer` now and then; `None` when the observer broke off.
///
/// Refused requests are part of the report. An error is a cost that takes the clock beyond its range, or a
/// scheduler that broke a rule.
pub fn replay(
    workload: &[Arrival],
    scheduler: Scheduler,
    config: &Config,
    cost: &Cost,
    options: Options,
    observer: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Option<Report>, Error> {
    match scheduler {
        Scheduler::Bucket => {
            drive::Drive::new(exclusive::Exclusive::new(config), workload, cost, options).run(observer)
        }
        Scheduler::Mixed => drive::Drive::new(mixed::Mixed::new(config)?, workload, cost, options).run(observer),
    }
}
