//! Whether a running request of an engine (vLLM) can decode, from the engine's own counters.

/// Progress of a running request in the engine's counters, in tokens.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Computed tokens, including those of steps in flight.
    pub computed: i64,
    /// Tokens with known ids: the prompt and the sampled outputs.
    pub tokens: i64,
    /// Draft tokens for the next step.
    pub drafts: i64,
    /// Outputs of steps in flight, including drafts.
    pub placeholders: i64,
    /// Length of the prompt.
    pub prompt: i64,
    /// Most output tokens.
    pub max_tokens: i64,
    /// First step in which the engine may schedule the request again.
    pub eligible_step: i64,
}

impl Progress {
    /// Whether the engine would compute an output token of the request in step `step`.
    ///
    /// `false` while prompt tokens are left, or outputs are recomputed after a preemption, and at `max_model_len`. With
    /// an output in flight, `false` too if that output is certain to be the last.
    pub fn decodes(&self, step: i64, max_model_len: u32) -> bool {
        let prompt_left = self.computed < self.prompt.max(self.tokens - 1);
        let certain = self.computed + 2 - self.placeholders;
        if prompt_left || (self.placeholders > 0 && certain >= self.prompt + self.max_tokens) {
            return false;
        }
        let known = self.tokens + self.drafts + self.placeholders;
        self.eligible_step <= step && known > self.computed && self.computed + 1 < i64::from(max_model_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v14_a_request_decodes_unless_its_output_in_flight_is_the_last() {
        let start = Progress {
            computed: 10,
            tokens: 11,
            drafts: 0,
            placeholders: 0,
            prompt: 10,
            max_tokens: 3,
            eligible_step: 0,
        };
        let at = |computed, tokens, placeholders| Progress { computed, tokens, placeholders, ..start }.decodes(1, 100);
        assert!(at(10, 11, 0) && at(10, 10, 1) && at(11, 11, 1));
        assert!(!at(12, 12, 1), "two outputs are known, the third is in flight");
        assert!(!at(11, 11, 0), "all known tokens are computed");
        assert!(!at(9, 10, 0) && !at(10, 12, 0), "prompt tokens are left, or outputs are recomputed");
        assert!(!Progress { eligible_step: 2, ..start }.decodes(1, 100));
        assert!(Progress { tokens: 10, drafts: 1, ..start }.decodes(1, 100));
        let end = Progress { computed: 99, tokens: 100, max_tokens: 200, ..start };
        assert!(!end.decodes(1, 100) && end.decodes(1, 101));
    }
}
