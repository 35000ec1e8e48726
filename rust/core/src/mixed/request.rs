//! What a request brings along, and how far it has come.

use crate::error::{Error, Fault};

/// The largest number that a field takes: up to here a float holds every whole number, so that counts
/// survive a trip through JSON.
pub const COUNT_MAX: u64 = 1 << 53;

/// A request to be added; counts are tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewMixed {
    /// Length of the prompt, from 1.
    pub prompt_len: u64,
    /// Outputs after which the request ends, from 1.
    pub max_new: u64,
    /// Tokens of the prompt that were computed before, at most `prompt_len`.
    pub prefilled: u64,
    /// Outputs that were generated before, fewer than `max_new`.
    pub generated: u64,
}

impl NewMixed {
    /// Whether every count is in its range; all that are not, in one [`Error::Invalid`].
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

    /// KV tokens that the request may need at worst: what is reserved while it runs.
    pub(super) fn reservation(&self) -> u64 {
        self.prompt_len + self.max_new
    }
}

/// Adds a fault unless `value` is in the range of a count.
pub(super) fn check_count(faults: &mut Vec<Fault>, field: &'static str, value: u64) {
    if !(1..=COUNT_MAX).contains(&value) {
        faults.push(Fault::new(field, value, format!("a whole number from 1 to {COUNT_MAX}")));
    }
}

/// How far a request has come, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of the prompt that are computed.
    pub prefilled: u64,
    /// Outputs generated.
    pub generated: u64,
}
