//! What a caller can do wrong.

use std::fmt;

/// One bad value: the field, what was given, and what is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Name of the field as the caller knows it.
    pub field: &'static str,
    /// The bad value, printed.
    pub value: String,
    /// What would have been right.
    pub expected: String,
}

impl Fault {
    /// A fault of `field`, which was given as `value`.
    pub fn new(field: &'static str, value: impl fmt::Display, expected: impl Into<String>) -> Self {
        Self { field, value: value.to_string(), expected: expected.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: expected {}", self.field, self.value, self.expected)
    }
}

/// A refused call. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// One or more bad values, all that were found.
    Invalid(Vec<Fault>),
    /// A bad value in one of several rows.
    Row {
        /// Position of the row.
        at: usize,
        /// What is wrong with it.
        fault: Fault,
    },
    /// A request whose prompt alone is longer than the model takes.
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: u64,
        /// The longest sequence of the model.
        max_model_len: u64,
    },
    /// A request whose worst case is larger than the whole KV cache: waiting would never help.
    NeverFits {
        /// What the request needs at worst.
        needed: u64,
        /// What the whole cache holds.
        usable: u64,
        /// `"blocks"` or `"tokens"`.
        unit: &'static str,
    },
    /// A step or plan that is not the one whose completion is due: an old, void, foreign or changed one.
    NotDue(&'static str),
    /// A planned step that breaks the rules of the hardware; names the rows and the counts.
    Violation(String),
    /// A conservation law that does not hold: a fault of the core.
    Broken(String),
}

impl Error {
    /// The error of a single bad value.
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
                write!(f, "kv: {needed} {unit} at worst: expected at most the {usable} {unit} of the whole cache")
            }
            Self::NotDue(why) => f.write_str(why),
            Self::Violation(what) | Self::Broken(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}
