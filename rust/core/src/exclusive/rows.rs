//! The rows of a step as tensors are filled from them.

use super::ExclusiveScheduler;
use crate::fill::{DecodeRow, PrefillRow};
use crate::request::Prompt;
use crate::step::Step;

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
        self.requests.get(step.rows[at])?;
        Some(self.held(step.seats[at], step.computed(at) + step.tokens(at)))
    }

    /// The row at `at` of a prefill step.
    pub fn prefill_row<'a>(&'a self, step: &Step, at: usize) -> Result<PrefillRow<'a>, Unfilled> {
        let request = self.requests.get(step.rows[at]).ok_or(Unfilled::TooOld)?;
        let Prompt::Tokens(ids) = &request.prompt else { return Err(Unfilled::Unknown(at)) };
        let (start, tokens) = (step.computed(at), step.tokens(at));
        let blocks = self.held(step.seats[at], start + tokens);
        let tokens = &ids[start as usize..][..tokens as usize];
        Ok(PrefillRow { tokens, start, blocks, sampling: request.sampling })
    }

    /// Whether [`ExclusiveScheduler::decode_rows`] knows every row. `given` has an entry a row: the token that it
    /// computes, or `None` for the one that the scheduler knows.
    pub fn check_decodes(&self, step: &Step, given: Option<&[Option<u32>]>) -> Result<(), Unfilled> {
        // Who was told a prompt must be told its outputs, so nobody has to be looked at.
        let due = self.pending.front().is_some_and(|pending| pending.step.id == step.id && !pending.disturbed);
        if due && self.lanes.all_told() {
            return Ok(());
        }
        let missing = |at: &usize| given.is_none_or(|given| given[*at].is_none());
        self.unknown_decodes(step)?.find(missing).map_or(Ok(()), |at| Err(Unfilled::Unknown(at)))
    }

    /// Positions of the rows of a decode step whose token the scheduler does not know.
    pub fn unknown_decodes<'a>(&'a self, step: &'a Step) -> Result<impl Iterator<Item = usize> + 'a, Unfilled> {
        // The seat of a request that is gone may be another's by now.
        if step.rows.iter().any(|&row| self.requests.get(row).is_none()) {
            return Err(Unfilled::TooOld);
        }
        let rows = step.seats.iter().zip(&step.computed).enumerate();
        let unknown = |&(_, (&seat, &at)): &(usize, (&u32, &u32))| self.started[seat as usize].output(at).is_none();
        Ok(rows.filter(unknown).map(|(at, _)| at))
    }

    /// The rows of a decode step, which [`ExclusiveScheduler::check_decodes`] let pass.
    pub fn decode_rows<'a>(
        &'a self,
        step: &'a Step,
        given: Option<&'a [Option<u32>]>,
    ) -> impl Iterator<Item = DecodeRow<'a>> {
        step.seats.iter().zip(&step.computed).enumerate().map(move |(at, (&seat, &position))| {
            let started = &self.started[seat as usize];
            let known = || started.output(position).expect("the step was checked");
            let token = given.and_then(|given| given[at]).unwrap_or_else(known);
            let blocks = self.held(seat, position + 1);
            DecodeRow { token, position, blocks, sampling: started.sampling, drafts: 0 }
        })
    }

    /// The blocks of a seat that were held when the tokens up to `end` had been planned, no later one.
    fn held(&self, seat: u32, end: u32) -> &[u32] {
        &self.started[seat as usize].blocks[..self.worst_case.blocks_for(end) as usize]
    }
}
