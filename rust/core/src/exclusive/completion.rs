//! The result of a completed step.

use std::sync::Arc;

use crate::decide::Step;
use crate::request::{Row, UNKNOWN_TOKEN};

/// The sampled tokens of a step, as the caller gives them.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// No token ids. Allowed if no emitting row has a prompt that was given as token ids.
    LeftOut,
    /// One entry per row: the token id, or `None` if the row emits no token or its id is not known.
    Given(&'a [Option<u32>]),
}

impl Tokens<'_> {
    pub(super) fn get(&self, at: usize) -> Option<u32> {
        match self {
            Self::LeftOut => None,
            Self::Given(tokens) => tokens[at],
        }
    }
}

/// Why a request finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// The request generated all output tokens that `max_tokens` and `max_model_len` allow.
    Length,
    /// The request emitted a stop token. Wins over [`Finish::Length`].
    Stop,
}

impl Finish {
    /// Stable name, for metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
        }
    }
}

/// One emitted token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Position of the row in the step.
    pub at: usize,
    /// The request that emitted the token.
    pub row: Row,
    /// The token id, if the caller gave it.
    pub token: Option<u32>,
    /// Why the request finished with this token, if it did.
    pub finish: Option<Finish>,
}

/// The result of a completed step. A request that ended before the completion has no outcome.
#[derive(Clone, Debug, Default)]
pub struct Completion {
    pub(super) step: Arc<Step>,
    /// Token id of each row, or [`UNKNOWN_TOKEN`]; empty if the caller gave no ids.
    tokens: Vec<u32>,
    /// Positions of the rows that emitted no token, ascending.
    pub(super) without_token: Vec<usize>,
    /// Positions of the rows with a request that finished, ascending.
    pub(super) finishes: Vec<(usize, Finish)>,
}

impl Completion {
    /// Clear everything but the step, and store the given tokens.
    pub(super) fn reset(&mut self, tokens: Tokens<'_>) {
        self.without_token.clear();
        self.finishes.clear();
        self.tokens.clear();
        if let Tokens::Given(given) = tokens {
            self.tokens.extend(given.iter().map(|token| token.unwrap_or(UNKNOWN_TOKEN)));
        }
    }

    /// Number of emitted tokens.
    pub fn len(&self) -> usize {
        self.step.rows.len() - self.without_token.len()
    }

    /// Whether no token was emitted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether every row emitted a token without an id, and no request finished.
    pub fn is_plain(&self) -> bool {
        self.tokens.is_empty() && self.without_token.is_empty() && self.finishes.is_empty()
    }

    /// Return the `nth` emitted token, in batch order.
    pub fn outcome(&self, nth: usize) -> Option<Outcome> {
        if nth >= self.len() {
            return None;
        }
        let at = self.without_token.iter().fold(nth, |at, &skipped| if skipped <= at { at + 1 } else { at });
        let token = self.tokens.get(at).copied().filter(|&token| token != UNKNOWN_TOKEN);
        let finish = self.finishes.binary_search_by_key(&at, |&(at, _)| at).ok().map(|i| self.finishes[i].1);
        Some(Outcome { at, row: self.step.rows[at], token, finish })
    }

    /// Return all emitted tokens, in batch order.
    pub fn iter(&self) -> impl Iterator<Item = Outcome> + '_ {
        (0..self.len()).map_while(|nth| self.outcome(nth))
    }

    /// Return the requests that finished, in batch order.
    pub fn finishes(&self) -> impl Iterator<Item = (Row, Finish)> + '_ {
        self.finishes.iter().map(|&(at, finish)| (self.step.rows[at], finish))
    }

    /// The completed step.
    pub fn step(&self) -> &Step {
        &self.step
    }
}
