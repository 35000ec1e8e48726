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

mod cost;
pub mod decimal;
mod drive;
mod engine;
mod exclusive;
mod mixed;
mod options;
mod replay;
mod report;
mod spread;
mod steps;
mod tally;
mod workload;

pub use cost::Cost;
pub use options::{Options, Progress, Scheduler};
pub use replay::replay;
pub use report::{Record, Refusal, Report, StepCounts, Summary, TokenCounts};
pub use spread::Spread;
pub use steps::{Entry, Recorded, Steps};
pub use tally::Bucket;
pub use workload::Arrival;
