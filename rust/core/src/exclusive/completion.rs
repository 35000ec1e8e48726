//! What came of a step.

use std::sync::Arc;

use crate::decide::Step;
use crate::request::{Row, UNKNOWN_TOKEN};

/// The tokens that a step emitted.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// Their ids are not told: possible where the prompts were lengths too.
    LeftOut,
    /// One entry a row: the token id, `None` for a row that emits nothing or whose id is not told.
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

/// Why a request ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// It emitted all the tokens that it may.
    Length,
    /// It emitted a stop token. Wins over the length.
    Stop,
}

impl Finish {
    /// The stable name.
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
    /// Position in the step's batch.
    pub at: usize,
    /// Who emitted it.
    pub row: Row,
    /// Its id, if told.
    pub token: Option<u32>,
    /// Set when the request ended with it.
    pub finish: Option<Finish>,
}

/// What came of a step. A request that ended before the completion has no outcome.
#[derive(Clone, Debug, Default)]
pub struct Completion {
    pub(super) step: Arc<Step>,
    /// By position; empty when left out.
    tokens: Vec<u32>,
    /// Positions that emitted nothing, ascending.
    pub(super) silent: Vec<usize>,
    /// Positions that ended, ascending.
    pub(super) finishes: Vec<(usize, Finish)>,
}

impl Completion {
    /// Forgets all but the step, and keeps the tokens that were told.
    pub(super) fn start(&mut self, tokens: Tokens<'_>) {
        self.silent.clear();
        self.finishes.clear();
        self.tokens.clear();
        if let Tokens::Given(given) = tokens {
            self.tokens.extend(given.iter().map(|token| token.unwrap_or(UNKNOWN_TOKEN)));
        }
    }

    /// Number of emitted tokens.
    pub fn len(&self) -> usize {
        self.step.rows.len() - self.silent.len()
    }

    /// Whether nothing was emitted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether every row emitted a token whose id was left out, and nobody ended.
    pub fn is_plain(&self) -> bool {
        self.tokens.is_empty() && self.silent.is_empty() && self.finishes.is_empty()
    }

    /// The `nth` emitted token, in batch order.
    pub fn outcome(&self, nth: usize) -> Option<Outcome> {
        if nth >= self.len() {
            return None;
        }
        let at = self.silent.iter().fold(nth, |at, &silent| if silent <= at { at + 1 } else { at });
        let token = self.tokens.get(at).copied().filter(|&token| token != UNKNOWN_TOKEN);
        let finish = self.finishes.binary_search_by_key(&at, |&(at, _)| at).ok().map(|i| self.finishes[i].1);
        Some(Outcome { at, row: self.step.rows[at], token, finish })
    }

    /// All emitted tokens, in batch order.
    pub fn iter(&self) -> impl Iterator<Item = Outcome> + '_ {
        (0..self.len()).map_while(|nth| self.outcome(nth))
    }

    /// Who ended, in batch order.
    pub fn finishes(&self) -> impl Iterator<Item = (Row, Finish)> + '_ {
        self.finishes.iter().map(|&(at, finish)| (self.step.rows[at], finish))
    }

    /// The step that was completed.
    pub fn step(&self) -> &Step {
        &self.step
    }
}
