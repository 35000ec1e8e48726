//! What a step plans and brings, and why the head of the queue is not in it.

use crate::request::Row;

/// One entry of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Who runs.
    pub row: Row,
    /// Its tokens in this step, at least 1.
    pub tokens: u64,
}

/// A request that emitted a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emitted {
    /// Who emitted.
    pub row: Row,
    /// Whether this was its last output; its row and its reservation are gone then.
    pub finished: bool,
}

/// What keeps the head of the waiting queue from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// The last plan had no token left for it.
    Budget,
    /// Every slot is held.
    Slots,
    /// The KV cache cannot take its prompt and outputs besides what is reserved.
    Kv,
    /// Nothing: the next plan admits it.
    Ready,
}

impl Wait {
    /// The stable name, for metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Budget => "budget",
            Self::Slots => "slots",
            Self::Kv => "kv",
            Self::Ready => "ready",
        }
    }
}
