//! Settings and progress of a replay.

/// The scheduler that a replay drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduler {
    /// [`crate::exclusive::ExclusiveScheduler`] with the given configuration.
    Bucket,
    /// [`crate::mixed::MixedScheduler`] with a token budget of `max_num_batched_tokens` and
    /// `num_blocks * block_size` KV tokens; steps are not padded.
    Mixed,
}

impl Scheduler {
    /// Return the scheduler of that name, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "bucket" => Some(Self::Bucket),
            "mixed" => Some(Self::Mixed),
            _ => None,
        }
    }
}

/// Settings of a replay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Whether every step is kept in `Report::steps`.
    pub record_steps: bool,
    /// Whether identical decode steps are completed one by one. The report is the same; the replay is slower.
    pub one_by_one: bool,
}

/// Progress of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of requests that completed or were refused.
    pub done: usize,
    /// Number of requests of the workload.
    pub total: usize,
}
