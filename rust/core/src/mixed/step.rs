//! The entries of a plan, the results of a step, and the reasons why the head of the queue waits.

use crate::request::Row;

/// One entry of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The scheduled request.
    pub row: Row,
    /// Number of its tokens in this step, at least 1.
    pub tokens: u64,
}

/// A request that emitted a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emitted {
    /// The request that emitted a token.
    pub row: Row,
    /// Whether the token was its last output. The handle is then stale and the reservation released.
    pub finished: bool,
}

/// Why the head of the waiting queue is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// The last plan used the whole token budget.
    Budget,
    /// `max_seqs` requests are running.
    Slots,
    /// Prompt and outputs of the head do not fit the KV cache beside the reservations.
    Kv,
    /// The head fits: the next plan admits it.
    Ready,
}

impl Wait {
    /// Stable name, for metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Budget => "budget",
            Self::Slots => "slots",
            Self::Kv => "kv",
            Self::Ready => "ready",
        }
    }
}
