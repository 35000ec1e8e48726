//! The counts of a request when it is added, and its progress.

use crate::error::{Error, Fault};

/// Largest value of a count. A float holds every integer up to this one, so that counts survive JSON.
pub const COUNT_MAX: u64 = 1 << 53;

/// A request to add, with counts in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewMixed {
    /// Length of the prompt, at least 1.
    pub prompt_len: u64,
    /// Output tokens after which the request finishes, at least 1.
    pub max_new: u64,
    /// Prompt tokens that are computed already, at most `prompt_len`.
    pub prefilled: u64,
    /// Output tokens that are generated already, fewer than `max_new`.
    pub generated: u64,
}

impl NewMixed {
    /// Return [`Error::Invalid`] with every count that is out of range.
    pub fn check(&self) -> Result<(), Error> {
        let mut faults = Vec::new();
        check_count(&mut faults, "prompt_len", self.prompt_len);
        check_count(&mut faults, "max_new", self.max_new);
        if self.prefilled > self.prompt_len {
            let expected = format!("a whole number from 0 to prompt_len = {}", self.prompt_len);
            faults.push(Fault::new("prefilled", self.prefilled, expected));
        }
        if self.generated >= self.max_new {
            let expected = format!("a whole number from 0 to max_new - 1, max_new = {}", self.max_new);
            faults.push(Fault::new("generated", self.generated, expected));
        }
        if faults.is_empty() { Ok(()) } else { Err(Error::Invalid(faults)) }
    }

    /// Number of KV tokens reserved while the request is running: its worst case.
    pub(super) fn reservation(&self) -> u64 {
        self.prompt_len + self.max_new
    }
}

/// Append a fault unless `value` is from 1 to [`COUNT_MAX`].
pub(super) fn check_count(faults: &mut Vec<Fault>, field: &'static str, value: u64) {
    if !(1..=COUNT_MAX).contains(&value) {
        faults.push(Fault::new(field, value, format!("a whole number from 1 to {COUNT_MAX}")));
    }
}

/// Progress of a request, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Computed prompt tokens.
    pub prefilled: u64,
    /// Generated output tokens.
    pub generated: u64,
}
