//! A running request as every step looks at it.

use crate::request::{Prompt, Row};

/// One running request. Small, since every step walks all of them.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    pub(super) row: Row,
    pub(super) prompt: u32,
    /// Computed tokens with which it ends by length: the last output is never computed.
    pub(super) end: u32,
    /// Tokens that were computed before it started: it shares their blocks.
    pub(super) hit: u32,
    /// Tokens computed by completed steps.
    pub(super) computed: u32,
    /// Tokens of planned steps.
    pub(super) planned: u32,
    /// KV slots of its blocks.
    pub(super) capacity: u32,
    /// Whether its outputs must be told: its prompt was.
    pub(super) told: bool,
}

impl Lane {
    /// Tokens computed once the planned steps have run.
    pub(super) fn projected(&self) -> u32 {
        self.computed + self.planned
    }

    /// Whether some of the prompt is left then.
    pub(super) fn prefilling(&self) -> bool {
        self.projected() < self.prompt
    }

    /// Whether it can decode then.
    pub(super) fn ready(&self) -> bool {
        (self.prompt..self.end).contains(&self.projected())
    }

    /// Prompt tokens that count as left: the whole prompt until the first chunk has run, so that packing
    /// and the first chunk do not depend on what was shared.
    pub(super) fn rest(&self) -> u32 {
        if self.projected() == self.hit { self.prompt } else { self.prompt - self.projected() }
    }

    /// Tokens emitted after `computed` tokens.
    pub(super) fn generated(computed: u32, prompt: u32) -> u32 {
        (computed + 1).saturating_sub(prompt)
    }

    /// Tokens of a prompt that was admitted.
    pub(super) fn length(prompt: &Prompt) -> u32 {
        u32::try_from(prompt.len()).expect("at most max_model_len")
    }
}
