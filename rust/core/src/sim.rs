//! Replay of a workload on a virtual clock: the schedulers of this crate plan, and a [`Cost`] gives the duration of
//! each step.
//!
//! Times are whole nanoseconds from the earliest arrival, called time zero. Requests with equal arrival times are added
//! in the order of the workload. A request that arrives exactly when a step ends is added before the next step is
//! planned. Idle time is skipped. A run of identical decode steps is completed in one call; the report is the same as
//! if each step were completed by itself.
//!
//! Rejected: a floating-point clock (rounding would decide ties between an arrival and the end of a step), and a list
//! of all inter-token latencies (equal ones are counted instead).

mod cost;
mod counters;
pub mod decimal;
mod distribution;
mod drive;
mod engine;
mod exclusive;
mod mixed;
mod options;
mod refusal;
mod replay;
mod report;
mod steps;
mod workload;

pub use cost::Cost;
pub use counters::Bucket;
pub use distribution::Distribution;
pub use options::{Options, Progress, Scheduler};
pub use refusal::Refusal;
pub use replay::replay;
pub use report::{Record, Report, StepCounts, Summary, TokenCounts};
pub use steps::{Entry, Recorded, Steps};
pub use workload::Arrival;
