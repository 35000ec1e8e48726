//! The rows of a step as tensors are filled from them.

use super::{ExclusiveScheduler, Started};
use crate::fill::{DecodeRow, PrefillRow};
use crate::request::{Prompt, Row, Sampling, UNKNOWN_TOKEN};
use crate::step::Step;

/// A row of a decode step, found again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    seat: u32,
    token: u32,
    sampling: Sampling,
}

impl Found {
    /// Id of the token that the row computes.
    pub fn token(&self) -> u32 {
        self.token
    }
}

/// Why the tensors of a step cannot be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfilled {
    /// Its blocks may have been handed out again.
    TooOld,
    /// The token ids of the row at this position are not known.
    Unknown(usize),
}

impl ExclusiveScheduler {
    /// The KV blocks of the row at `at` of `step` as they were when it was planned; `None` when the step
    /// is too old to tell.
    pub fn step_blocks(&self, step: &Step, at: usize) -> Option<&[u32]> {
        self.held(self.started(step.rows[at])?, step.computed(at) + step.tokens(at))
    }

    /// The row at `at` of a prefill step.
    pub fn prefill_row<'a>(&'a self, step: &Step, at: usize) -> Result<PrefillRow<'a>, Unfilled> {
        let request = self.requests.get(step.rows[at]).ok_or(Unfilled::TooOld)?;
        let blocks = self.step_blocks(step, at).ok_or(Unfilled::TooOld)?;
        let (start, tokens) = (step.computed(at), step.tokens(at));
        let Prompt::Tokens(ids) = &request.prompt else { return Err(Unfilled::Unknown(at)) };
        let tokens = &ids[start as usize..][..tokens as usize];
        Ok(PrefillRow { tokens, start, blocks, sampling: request.sampling })
    }

    /// The row at `at` of a decode step, which computes the token `given`, or else the one that is known.
    pub fn find_decode(&self, step: &Step, at: usize, given: Option<u32>) -> Result<Found, Unfilled> {
        let request = self.requests.get(step.rows[at]).ok_or(Unfilled::TooOld)?;
        let seat = request.seat.ok_or(Unfilled::TooOld)?;
        let started = &self.started[seat as usize];
        let known = || {
            let output = (step.computed(at) as usize).checked_sub(request.prompt.len())?;
            started.outputs.get(output).copied().filter(|&token| token != UNKNOWN_TOKEN)
        };
        let token = given.or_else(known).ok_or(Unfilled::Unknown(at))?;
        Ok(Found { seat, token, sampling: request.sampling })
    }

    /// The rows of a decode step, all of which were found since anything was changed.
    pub fn decode_rows<'a>(&'a self, step: &'a Step, found: &'a [Found]) -> impl Iterator<Item = DecodeRow<'a>> {
        step.computed.iter().zip(found).map(|(&position, &Found { seat, token, sampling })| {
            let blocks = self.held(&self.started[seat as usize], position + 1).expect("the row was found");
            DecodeRow { token, position, blocks, sampling, drafts: 0 }
        })
    }

    fn started(&self, row: Row) -> Option<&Started> {
        self.requests.get(row)?.seat.map(|seat| &self.started[seat as usize])
    }

    /// The blocks that were held when the tokens up to `end` had been planned, no later one.
    fn held<'a>(&self, started: &'a Started, end: u32) -> Option<&'a [u32]> {
        started.blocks.get(..self.worst_case.blocks_for(end) as usize)
    }
}
