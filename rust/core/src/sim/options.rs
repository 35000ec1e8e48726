//! Settings and progress of a replay.

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
