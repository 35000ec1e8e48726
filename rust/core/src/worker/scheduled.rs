//! A step as an engine's scheduler sends it.

use crate::request::{Row, Sampling};

/// A step with at least one request.
#[derive(Clone, Debug, Default)]
pub struct ScheduledStep {
    /// Requests that finished before the step.
    pub finished: Vec<Row>,
    /// Scheduled requests, in batch order.
    pub rows: Vec<ScheduledRow>,
    /// Padded number of rows of a decode step; 0 for a prefill.
    pub num_seqs_padded: i64,
}

/// One request of a step.
#[derive(Clone, Debug)]
pub struct ScheduledRow {
    /// The request, and what has changed since its last step.
    pub update: RequestUpdate,
    /// KV blocks in order of position: the new ones of a known request, else all.
    pub blocks: Vec<u32>,
    /// Number of tokens computed before the step.
    pub computed: i64,
    /// Number of tokens to compute, unpadded.
    pub count: i64,
    /// Number of tokens to compute, padded.
    pub padded: i64,
}

/// What a step says about a request besides its counts.
#[derive(Clone, Debug)]
pub enum RequestUpdate {
    /// A request sent in full: a new one, or one that the scheduler sends again.
    New {
        /// Prompt tokens, followed by the output tokens sampled so far, if any.
        tokens: Vec<u32>,
        /// Number of prompt tokens.
        prompt: usize,
        /// Sampling parameters.
        sampling: Sampling,
        /// The request that had the same id.
        replaces: Option<Row>,
    },
    /// A request of an earlier step.
    Known {
        /// Handle of the request.
        row: Row,
        /// Number of output tokens, including those of steps in flight.
        outputs: i64,
    },
    /// A request of an earlier step that resumes after a preemption, with new KV blocks.
    Resumed {
        /// Handle of the request.
        row: Row,
        /// Number of output tokens that the request keeps.
        outputs: i64,
        /// Prompt tokens followed by the output tokens that the scheduler has received.
        tokens: Vec<u32>,
    },
}
