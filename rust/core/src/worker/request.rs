//! What is kept of a request.

use crate::error::Fault;
use crate::request::{Sampling, TOKENS_MAX};

#[derive(Clone, Debug)]
pub(super) struct Request {
    /// Prompt and outputs, as far as they are known.
    pub(super) tokens: Vec<u32>,
    pub(super) blocks: Vec<u32>,
    /// Tokens of the prompt.
    pub(super) prompt: u32,
    pub(super) sampling: Sampling,
    /// Tokens that are computed once all that was filled has run.
    pub(super) end: u32,
    /// How often it was set back. What was in flight then is of no more concern.
    pub(super) turn: u32,
}

impl Request {
    /// Tokens of the prompt, and all that there are with so many outputs.
    pub(super) fn count(&self, outputs: i64) -> Result<(i64, i64), Fault> {
        let prompt = i64::from(self.prompt);
        let most = i64::from(TOKENS_MAX) - prompt;
        if !(0..=most).contains(&outputs) {
            return Err(Fault::new("num_output_tokens", outputs, format!("a count from 0 to {most}")));
        }
        Ok((prompt, prompt + outputs))
    }

    /// Lets go of outputs that the scheduler has taken back.
    pub(super) fn forget(&mut self, outputs: i64) {
        let outputs = usize::try_from(outputs).unwrap_or(usize::MAX);
        self.tokens.truncate((self.prompt as usize).saturating_add(outputs));
    }

    /// The tokens from `start` to `end` are computed now. Where some of them were before, it was set back.
    pub(super) fn go_on(&mut self, start: u32, end: u32) {
        if start < self.end {
            self.turn += 1;
        }
        self.end = end;
    }

    /// Appends the token that was sampled for a position. Steps are accepted in order, so it is the next one, unless
    /// the scheduler has taken back what came before it.
    pub(super) fn learn(&mut self, at: u32, token: u32) {
        if self.tokens.len() == at as usize {
            self.tokens.push(token);
        }
    }
}
