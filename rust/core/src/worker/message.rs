//! A step as an engine's scheduler tells it.

use crate::request::{Row, Sampling};

/// A step with somebody in it.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Who ended before it.
    pub finished: Vec<Row>,
    /// Who runs, in batch order.
    pub rows: Vec<ToldRow>,
    /// Rows that a decode is padded to; 0 for a prefill.
    pub num_seqs_padded: i64,
}

/// One request of a step.
#[derive(Clone, Debug)]
pub struct ToldRow {
    /// Which one, and what else is told of it.
    pub who: Who,
    /// Blocks: of a known request those that are new, else all.
    pub blocks: Vec<u32>,
    /// Tokens computed before the step.
    pub computed: i64,
    /// Tokens to compute.
    pub count: i64,
    /// The same with padding.
    pub padded: i64,
}

/// What a step tells of a request beside its counts.
#[derive(Clone, Debug)]
pub enum Who {
    /// It is told for the first time, or anew.
    New {
        /// Prompt, and outputs where it had some before.
        tokens: Vec<u32>,
        /// Tokens of the prompt.
        prompt: usize,
        /// For the sampler.
        sampling: Sampling,
        /// The request that had the same name.
        replaces: Option<Row>,
    },
    /// It goes on.
    Known {
        /// Its handle.
        row: Row,
        /// Outputs, those of steps in flight included.
        outputs: i64,
    },
    /// It starts over: its blocks were taken away.
    Resumed {
        /// Its handle.
        row: Row,
        /// Outputs that were kept.
        outputs: i64,
        /// Prompt, and outputs as far as the scheduler knows them.
        tokens: Vec<u32>,
    },
}
