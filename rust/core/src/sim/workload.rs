//! The requests of a workload.

use crate::request::{Prompt, outputs_max};

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Arrival time in nanoseconds. Only differences between requests matter.
    pub at: u64,
    /// Prompt of at least one token.
    pub prompt: Prompt,
    /// Number of tokens to generate, at least 1. A request generates fewer if it reaches `max_model_len`.
    pub outputs: u32,
    /// Priority under policy `"priority"`; the lowest number is admitted first.
    pub priority: i64,
}

impl Arrival {
    /// Return the number of tokens that the request generates if a sequence has at most `max_model_len` tokens.
    pub(super) fn capped(&self, max_model_len: u32) -> u32 {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        outputs_max(prompt, self.outputs, max_model_len)
    }
}
