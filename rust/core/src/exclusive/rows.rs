//! The rows of a step as tensors are filled from them.

use super::request::Place;
use super::scheduler::ExclusiveScheduler;
use crate::decide::Step;
use crate::fill::{DecodeRow, PrefillRow};
use crate::request::{Prompt, Row};

/// Why the tensors of a step cannot be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfilled {
    /// Its blocks may have been handed out again.
    TooOld,
    /// The token ids of the row at this position are not known.
    Unknown(usize),
    /// The row at this position computes another token than the caller gives.
    Other(usize, u32),
}

impl ExclusiveScheduler {
    /// The KV blocks of the row at `at` of `step` as they were when it was planned; `None` when the step
    /// is too old to tell.
    pub fn step_blocks(&self, step: &Step, at: usize) -> Option<&[u32]> {
        self.requests.get(step.rows[at])?;
        Some(self.held(step.seats[at], step.computed(at) + step.tokens(at)))
    }

    /// The row at `at` of a prefill step.
    pub fn prefill_row<'a>(&'a self, step: &Step, at: usize) -> Result<PrefillRow<'a>, Unfilled> {
        let request = self.requests.get(step.rows[at]).ok_or(Unfilled::TooOld)?;
        if !self.holds(step.rows[at], self.is_pending(step)) {
            return Err(Unfilled::TooOld);
        }
        let Prompt::Tokens(ids) = &request.prompt else { return Err(Unfilled::Unknown(at)) };
        let (start, tokens) = (step.computed(at), step.tokens(at));
        let blocks = self.held(step.seats[at], start + tokens);
        let tokens = &ids[start as usize..][..tokens as usize];
        Ok(PrefillRow { tokens, start, blocks, sampling: request.sampling })
    }

    /// Whether [`ExclusiveScheduler::decode_rows`] knows every row. `given` has an entry a row: the token that it
    /// computes, or `None` where the scheduler knows it.
    pub fn check_decodes(&self, step: &Step, given: Option<&[Option<u32>]>) -> Result<(), Unfilled> {
        let Some(given) = given else {
            // Who was told a prompt must be told its outputs, so nobody has to be looked at.
            let due = self.pending.front().is_some_and(|pending| pending.step.id == step.id && !pending.disturbed);
            if due && self.lanes.all_told() {
                return Ok(());
            }
            return self.unknown_decodes(step)?.next().map_or(Ok(()), |at| Err(Unfilled::Unknown(at)));
        };
        for (at, (known, &given)) in self.outputs(step)?.zip(given).enumerate() {
            match (known, given) {
                (None, None) => return Err(Unfilled::Unknown(at)),
                (Some(known), Some(given)) if known != given => return Err(Unfilled::Other(at, known)),
                (Some(_), _) | (None, Some(_)) => {}
            }
        }
        Ok(())
    }

    /// Positions of the rows of a decode step whose token the scheduler does not know.
    pub fn unknown_decodes<'a>(&'a self, step: &'a Step) -> Result<impl Iterator<Item = usize> + 'a, Unfilled> {
        Ok(self.outputs(step)?.enumerate().filter(|(_, known)| known.is_none()).map(|(at, _)| at))
    }

    /// The tokens of a decode step, as far as the scheduler was told.
    fn outputs<'a>(&'a self, step: &'a Step) -> Result<impl Iterator<Item = Option<u32>> + 'a, Unfilled> {
        let pending = self.is_pending(step);
        if !step.rows.iter().all(|&row| self.holds(row, pending)) {
            return Err(Unfilled::TooOld);
        }
        let outputs = step.seats.iter().zip(&step.computed);
        Ok(outputs.map(|(&seat, &position)| self.started[seat as usize].output(position)))
    }

    /// The tokens of a decode step, which [`ExclusiveScheduler::check_decodes`] let pass.
    pub fn decode_tokens<'a>(
        &'a self,
        step: &'a Step,
        given: Option<&'a [Option<u32>]>,
    ) -> impl Iterator<Item = u32> + 'a {
        step.seats.iter().zip(&step.computed).enumerate().map(move |(at, (&seat, &position))| {
            let given = || given.and_then(|given| given[at]);
            self.started[seat as usize].output(position).or_else(given).expect("the step was checked")
        })
    }

    /// The rows of a decode step, which [`ExclusiveScheduler::check_decodes`] let pass.
    pub fn decode_rows<'a>(
        &'a self,
        step: &'a Step,
        given: Option<&'a [Option<u32>]>,
    ) -> impl Iterator<Item = DecodeRow<'a>> {
        let rows = step.seats.iter().zip(&step.computed);
        rows.zip(self.decode_tokens(step, given)).map(|((&seat, &position), token)| {
            let sampling = self.started[seat as usize].sampling;
            DecodeRow { token, position, blocks: self.held(seat, position + 1), sampling, drafts: 0 }
        })
    }

    /// Tokens that the longest row of a decode step looks back on, its own and its drafts included.
    pub fn decode_context(&self, step: &Step) -> u32 {
        step.computed.iter().max().map_or(0, |&position| self.worst_case.slots_for(position + 1))
    }

    /// Whether the step was planned and is still to be completed.
    fn is_pending(&self, step: &Step) -> bool {
        self.pending.iter().any(|pending| pending.step.id == step.id)
    }

    /// Whether the blocks of a row of a step, which is `pending` or not, are nobody else's. Those of a request that
    /// was cancelled while its step was on its way are not written by any step that runs before that one.
    fn holds(&self, row: Row, pending: bool) -> bool {
        self.requests.get(row).is_some_and(|request| pending || request.place == Place::Running)
    }

    /// The blocks of a seat that were held when the tokens up to `end` had been planned, no later one.
    fn held(&self, seat: u32, end: u32) -> &[u32] {
        &self.started[seat as usize].blocks[..self.worst_case.blocks_for(end) as usize]
    }
}
