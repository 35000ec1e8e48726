//! Why a request of a workload can never run.

use crate::error::Error;

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The prompt is longer than `max_model_len`.
    PromptTooLong,
    /// The worst case of the request is larger than the whole KV cache.
    KvNeverFits,
}

impl Refusal {
    /// Return the stable name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::PromptTooLong => "prompt_too_long",
            Self::KvNeverFits => "kv_never_fits",
        }
    }

    /// Return the refusal for an error of `add`, or the error itself if it is not a refusal.
    pub(super) fn of(error: Error) -> Result<Self, Error> {
        match error {
            Error::PromptTooLong { .. } => Ok(Self::PromptTooLong),
            Error::NeverFits { .. } => Ok(Self::KvNeverFits),
            other => Err(other),
        }
    }
}
