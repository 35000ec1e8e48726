//! The state of one request.

use crate::error::Fault;
use crate::request::{Sampling, TOKENS_MAX};

#[derive(Clone, Debug)]
pub(super) struct Request {
    /// Prompt tokens followed by the known output tokens.
    pub(super) tokens: Vec<u32>,
    pub(super) blocks: Vec<u32>,
    /// Number of prompt tokens.
    pub(super) prompt: u32,
    pub(super) sampling: Sampling,
    /// Number of tokens computed once every filled step has run.
    pub(super) end: u32,
    /// Number of times that computed tokens were discarded. The output of a step filled before a reset is ignored.
    pub(super) resets: u32,
}

impl Request {
    /// Return the number of prompt tokens, and the number of all tokens with `outputs` output tokens.
    pub(super) fn count(&self, outputs: i64) -> Result<(i64, i64), Fault> {
        let prompt = i64::from(self.prompt);
        let most = i64::from(TOKENS_MAX) - prompt;
        if !(0..=most).contains(&outputs) {
            return Err(Fault::new("num_output_tokens", outputs, format!("a count from 0 to {most}")));
        }
        Ok((prompt, prompt + outputs))
    }

    /// Drop the output tokens after the first `outputs`, which the scheduler has discarded.
    pub(super) fn truncate_outputs(&mut self, outputs: i64) {
        let outputs = usize::try_from(outputs).unwrap_or(usize::MAX);
        self.tokens.truncate((self.prompt as usize).saturating_add(outputs));
    }

    /// Record a step that computes the tokens from `start` to `end`. Computing a token again is a reset.
    pub(super) fn schedule(&mut self, start: u32, end: u32) {
        if start < self.end {
            self.resets += 1;
        }
        self.end = end;
    }

    /// Append the token sampled for position `at`. Steps are accepted in order, so it is the next position, unless the
    /// scheduler has discarded the tokens before it.
    pub(super) fn append_sampled(&mut self, at: u32, token: u32) {
        if self.tokens.len() == at as usize {
            self.tokens.push(token);
        }
    }
}
