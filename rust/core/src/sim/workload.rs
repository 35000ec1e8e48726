//! The requests of a workload.

use crate::request::{Prompt, outputs_max};

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
    pub(super) fn capped(&self, max_model_len: u32) -> u32 {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        outputs_max(prompt, self.outputs, max_model_len)
    }
}
