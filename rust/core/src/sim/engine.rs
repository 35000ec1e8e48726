//! The interface between the replay loop and a scheduler.

use super::cost::Cost;
use super::refusal::Refusal;
use super::workload::Arrival;
use crate::error::Error;
use crate::request::Row;

/// A planned step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision {
    /// Number of prompt tokens; 0 in a decode step.
    pub prompt: u32,
    /// Padded number of prompt tokens.
    pub prompt_padded: u32,
    /// Number of decode rows, one token each.
    pub decodes: u32,
    /// Padded number of decode rows.
    pub decodes_padded: u32,
}

impl Decision {
    /// Return whether the step counts as a prefill.
    pub(super) fn is_prefill(self) -> bool {
        self.prompt > 0
    }

    /// Return the duration of the step in nanoseconds: that of its prefill plus that of its decodes.
    pub(super) fn time(self, cost: &Cost) -> u64 {
        let prefill = if self.prompt > 0 { cost.prefill(self.prompt_padded) } else { 0 };
        let decode = if self.decodes > 0 { cost.decode(self.decodes_padded) } else { 0 };
        prefill.saturating_add(decode)
    }
}

/// The result of adding a request.
pub(super) enum Added {
    /// The request waits; its handle, and the number of tokens that it will generate.
    Accepted(Row, u32),
    /// The request can never run.
    Refused(Refusal),
}

/// A scheduler driven by the replay loop.
pub(super) trait Engine {
    /// Whether steps are padded to compiled sizes.
    const PADS: bool;

    /// Add a request.
    fn add(&mut self, arrival: &Arrival) -> Result<Added, Error>;

    /// Plan the next step; `None` if no request can run.
    fn decide(&mut self) -> Result<Option<Decision>, Error>;

    /// Return the requests of the planned step with their token counts, in batch order, decodes first.
    fn entries(&self) -> impl Iterator<Item = (Row, u32)>;

    /// Return why the head of the waiting queue waits; `None` if the queue is empty.
    fn wait(&self) -> Option<&'static str>;

    /// Return the number of identical decode steps guaranteed to follow, including the planned one.
    fn horizon(&self) -> u64;

    /// Complete the planned step `times` in a row, at most the horizon. Calls `update` with each row for which the last
    /// of these steps emits the first token or the last token, and with whether the request has finished.
    fn complete(&mut self, times: u64, update: impl FnMut(Row, bool)) -> Result<(), Error>;
}
