//! A snapshot of one request for the caller.

use super::completion::Finish;
use super::request::{RequestState, RunningRequest};
use super::scheduler::ExclusiveScheduler;
use crate::request::{Prompt, Row};

/// Status of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// In the waiting queue.
    Waiting,
    /// Running, with prompt tokens left to compute.
    Prefill,
    /// Running, with a computed prompt.
    Decode,
    /// Ended by its length or by a stop token.
    Finished(Finish),
    /// Ended by `cancel`.
    Cancelled,
}

impl Status {
    /// Whether the request has not ended.
    pub fn is_live(self) -> bool {
        matches!(self, Self::Waiting | Self::Prefill | Self::Decode)
    }
}

/// A snapshot of one request. Counts are those of the last completed step.
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'a> {
    /// Status of the request.
    pub status: Status,
    /// Number of computed tokens.
    pub computed: u32,
    /// Number of generated tokens.
    pub generated: u32,
    /// Output token ids up to the last known one; [`crate::request::UNKNOWN_TOKEN`] for an unknown id before it.
    pub outputs: &'a [u32],
    /// KV blocks of the request in order of position; empty if the request is not running.
    pub blocks: &'a [u32],
    /// The prompt.
    pub prompt: &'a Prompt,
}

impl ExclusiveScheduler {
    /// Return a snapshot of a request, or `None` once its end was reported and the next step planned.
    pub fn view(&self, row: Row) -> Option<RequestView<'_>> {
        let request = self.requests.get(row)?;
        let started = request.slot.map(|slot| &self.started[slot as usize]);
        let (computed, prompt_len) = match self.running_position(row) {
            Some(at) => (self.running.get(at).computed, self.running.get(at).prompt_len),
            None => (started.map_or(0, |started| started.computed), RunningRequest::length(&request.prompt)),
        };
        let status = match request.state {
            RequestState::Waiting(_) => Status::Waiting,
            RequestState::Running if computed < prompt_len => Status::Prefill,
            RequestState::Running => Status::Decode,
            RequestState::Ended(Some(finish)) => Status::Finished(finish),
            RequestState::Ended(None) => Status::Cancelled,
        };
        let running = started.filter(|_| request.state == RequestState::Running);
        let blocks = running.map_or(&[][..], |started| &started.blocks);
        let outputs = started.map_or(&[][..], |started| &started.outputs);
        let generated = RunningRequest::generated(computed, prompt_len);
        Some(RequestView { status, computed, generated, outputs, blocks, prompt: &request.prompt })
    }
}
