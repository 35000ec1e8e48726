//! The state of one request, as a caller sees it.

use super::completion::Finish;
use super::request::Place;
use super::running::Lane;
use super::scheduler::ExclusiveScheduler;
use crate::request::{Prompt, Row};

/// Status of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// In the queue.
    Waiting,
    /// Its prompt is not done.
    Prefill,
    /// It emits tokens.
    Decode,
    /// It ended by itself.
    Finished(Finish),
    /// It was cancelled.
    Cancelled,
}

impl Status {
    /// Whether it has not ended.
    pub fn is_live(self) -> bool {
        matches!(self, Self::Waiting | Self::Prefill | Self::Decode)
    }
}

/// A look at one request.
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'a> {
    /// Its status, as of the last completed step.
    pub status: Status,
    /// Tokens computed, as of the last completed step.
    pub computed: u32,
    /// Tokens emitted.
    pub generated: u32,
    /// Their ids as far as they were told, [`crate::request::UNKNOWN_TOKEN`] in between.
    pub outputs: &'a [u32],
    /// The KV blocks that it holds.
    pub blocks: &'a [u32],
    /// Its prompt.
    pub prompt: &'a Prompt,
}

impl ExclusiveScheduler {
    /// A look at a request; `None` once its end was delivered and the next step planned.
    pub fn view(&self, row: Row) -> Option<RequestView<'_>> {
        let request = self.requests.get(row)?;
        let started = request.seat.map(|seat| &self.started[seat as usize]);
        let (computed, prompt) = match self.lane_of(row) {
            Some(at) => (self.lanes.get(at).computed, self.lanes.get(at).prompt),
            None => (started.map_or(0, |started| started.computed), Lane::length(&request.prompt)),
        };
        let status = match request.place {
            Place::Waiting(_) => Status::Waiting,
            Place::Running if computed < prompt => Status::Prefill,
            Place::Running => Status::Decode,
            Place::Ended(Some(finish)) => Status::Finished(finish),
            Place::Ended(None) => Status::Cancelled,
        };
        let blocks = started.filter(|_| request.place == Place::Running).map_or(&[][..], |started| &started.blocks);
        let outputs = started.map_or(&[][..], |started| &started.outputs);
        let generated = Lane::generated(computed, prompt);
        Some(RequestView { status, computed, generated, outputs, blocks, prompt: &request.prompt })
    }
}
