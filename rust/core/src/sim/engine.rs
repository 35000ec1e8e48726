//! What the clock needs from a scheduler.

use super::cost::Cost;
use super::report::Refusal;
use super::workload::Arrival;
use crate::error::Error;
use crate::request::Row;

/// A step that is about to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision {
    /// Prompt tokens; 0 in a decode step.
    pub prompt: u32,
    /// The same, as padded.
    pub prompt_padded: u32,
    /// Rows that decode one token each.
    pub decodes: u32,
    /// The same, as padded.
    pub decodes_padded: u32,
}

impl Decision {
    /// Whether the step counts as a prefill.
    pub(super) fn is_prefill(self) -> bool {
        self.prompt > 0
    }

    /// How long it takes; a part that is absent takes no time.
    pub(super) fn time(self, cost: &Cost) -> u64 {
        let prefill = if self.prompt > 0 { cost.prefill(self.prompt_padded) } else { 0 };
        let decode = if self.decodes > 0 { cost.decode(self.decodes_padded) } else { 0 };
        prefill.saturating_add(decode)
    }
}

/// What happened to a request that was added.
pub(super) enum Added {
    /// It waits, and will generate so many tokens.
    Accepted(Row, u32),
    /// It can never run.
    Refused(Refusal),
}

/// A scheduler under the clock.
pub(super) trait Engine {
    /// Whether steps are padded to compiled sizes.
    const PADS: bool;

    /// Adds a request.
    fn add(&mut self, arrival: &Arrival) -> Result<Added, Error>;

    /// Plans the next step; `None` when there is nothing to do.
    fn decide(&mut self) -> Result<Option<Decision>, Error>;

    /// The planned step in batch order, decodes first: the request and its tokens.
    fn entries(&self) -> impl Iterator<Item = (Row, u32)>;

    /// Why the head of the waiting queue waits; `None` when nobody waits.
    fn wait(&self) -> Option<&'static str>;

    /// How many decode steps equal to the planned one follow in a row, itself included.
    fn horizon(&self) -> u64;

    /// Completes the planned step `times` in a row, at most the horizon, and gives the rows for which the
    /// last of them brought news: a first token or, then the flag is set, the end.
    fn complete(&mut self, times: u64, news: impl FnMut(Row, bool)) -> Result<(), Error>;
}
