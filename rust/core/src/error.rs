//! Errors that a caller can cause.

use std::fmt;

/// A bad value: the field, the value and the expectation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Name of the field in the caller's API.
    pub field: &'static str,
    /// The bad value as text.
    pub value: String,
    /// The values that are accepted.
    pub expected: String,
}

impl Fault {
    /// Return the fault of a `field` that has the bad `value`.
    pub fn new(field: &'static str, value: impl fmt::Display, expected: impl Into<String>) -> Self {
        Self { field, value: value.to_string(), expected: expected.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: expected {}", self.field, self.value, self.expected)
    }
}

/// The reason why a call was refused. A refused call changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// Every bad value that was found, at least one.
    Invalid(Vec<Fault>),
    /// A bad value in one row of a batch.
    Row {
        /// Position of the row in the batch.
        at: usize,
        /// The bad value.
        fault: Fault,
    },
    /// A request with a prompt longer than `max_model_len`.
    PromptTooLong {
        /// Length of the prompt, in tokens.
        prompt: u64,
        /// Length of the longest sequence, in tokens.
        max_model_len: u64,
    },
    /// A request with a worst case larger than the whole KV cache, so that it can never be admitted.
    NeverFits {
        /// Worst case of the request, in `unit`.
        needed: u64,
        /// Size of the whole KV cache, in `unit`.
        usable: u64,
        /// `"blocks"` or `"tokens"`.
        unit: &'static str,
    },
    /// A step or plan that is not the next to complete: it was completed or replaced already, or an earlier step is
    /// still in flight.
    NotDue(&'static str),
    /// A step that no compiled graph can run; the message names the request and the counts.
    BadStep(String),
    /// A violated invariant; always a bug in the core.
    InvariantViolated(String),
}

impl Error {
    /// Return [`Error::Invalid`] with a single bad value.
    pub fn invalid(field: &'static str, value: impl fmt::Display, expected: impl Into<String>) -> Self {
        Self::Invalid(vec![Fault::new(field, value, expected)])
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(faults) => {
                for (i, fault) in faults.iter().enumerate() {
                    if i > 0 {
                        f.write_str("\n")?;
                    }
                    fault.fmt(f)?;
                }
                Ok(())
            }
            Self::Row { at, fault } => write!(f, "rows[{at}].{fault}"),
            Self::PromptTooLong { prompt, max_model_len } => {
                write!(f, "prompt: {prompt} tokens: expected at most max_model_len = {max_model_len}")
            }
            Self::NeverFits { needed, usable, unit } => {
                write!(f, "kv: {needed} {unit} in the worst case: expected at most {usable} {unit}, the whole KV cache")
            }
            Self::NotDue(text) => f.write_str(text),
            Self::BadStep(text) => f.write_str(text),
            Self::InvariantViolated(invariant) => write!(f, "invariant violated: {invariant}"),
        }
    }
}

impl std::error::Error for Error {}
