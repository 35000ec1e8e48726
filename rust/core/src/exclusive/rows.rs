//! The rows of a step as tensors are filled from them.

use super::{ExclusiveScheduler, Request, Started};
use crate::fill::{DecodeRow, PrefillRow};
use crate::request::{Prompt, Row, UNKNOWN_TOKEN};
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
        let (_, started) = self.started(step.rows[at])?;
        self.held(started, step.computed(at) + step.tokens(at))
    }

    /// The row at `at` of a prefill step.
    pub fn prefill_row<'a>(&'a self, step: &Step, at: usize) -> Result<PrefillRow<'a>, Unfilled> {
        let (request, _) = self.started(step.rows[at]).ok_or(Unfilled::TooOld)?;
        let blocks = self.step_blocks(step, at).ok_or(Unfilled::TooOld)?;
        let (start, tokens) = (step.computed(at), step.tokens(at));
        let Prompt::Tokens(ids) = &request.prompt else { return Err(Unfilled::Unknown(at)) };
        let tokens = &ids[start as usize..][..tokens as usize];
        Ok(PrefillRow { tokens, start, blocks, sampling: request.sampling })
    }

    /// Whether [`ExclusiveScheduler::decode_rows`] knows every row. `given` has an entry a row: the token that it
    /// computes, or `None` for the one that the scheduler knows.
    pub fn check_decodes(&self, step: &Step, given: Option<&[Option<u32>]>) -> Result<(), Unfilled> {
        // Requests that were told their prompt must be told their outputs, so nobody has to be looked at.
        let due = self.pending.front().is_some_and(|pending| pending.step.id == step.id && !pending.disturbed);
        if due && self.lanes.all_told() {
            return Ok(());
        }
        for (at, (&row, &computed)) in step.rows.iter().zip(&step.computed).enumerate() {
            let (request, started) = self.started(row).ok_or(Unfilled::TooOld)?;
            let known = given.and_then(|given| given[at]).is_some() || output(request, started, computed).is_some();
            if !known {
                return Err(Unfilled::Unknown(at));
            }
        }
        Ok(())
    }

    /// Positions of the rows of a decode step whose token the scheduler does not know.
    pub fn unknown_decodes<'a>(&'a self, step: &'a Step) -> impl Iterator<Item = usize> + 'a {
        let rows = step.rows.iter().zip(&step.computed).enumerate();
        let known = |row, computed| {
            self.started(row).is_none_or(|(request, started)| output(request, started, computed).is_some())
        };
        rows.filter(move |&(_, (&row, &computed))| !known(row, computed)).map(|(at, _)| at)
    }

    /// The rows of a decode step, which [`ExclusiveScheduler::check_decodes`] let pass.
    pub fn decode_rows<'a>(
        &'a self,
        step: &'a Step,
        given: Option<&'a [Option<u32>]>,
    ) -> impl Iterator<Item = DecodeRow<'a>> {
        step.rows.iter().zip(&step.computed).enumerate().map(move |(at, (&row, &position))| {
            let (request, started) = self.started(row).expect("the step was checked");
            let known = || output(request, started, position);
            let token = given.and_then(|given| given[at]).or_else(known).expect("the step was checked");
            let blocks = self.held(started, position + 1).expect("whoever decodes has a block for it");
            DecodeRow { token, position, blocks, sampling: request.sampling, drafts: 0 }
        })
    }

    fn started(&self, row: Row) -> Option<(&Request, &Started)> {
        let request = self.requests.get(row)?;
        Some((request, &self.started[request.seat? as usize]))
    }

    /// The blocks that were held when the tokens up to `end` had been planned, no later one.
    fn held<'a>(&self, started: &'a Started, end: u32) -> Option<&'a [u32]> {
        started.blocks.get(..self.worst_case.blocks_for(end) as usize)
    }
}

/// The output at position `at` of the sequence of a request, if it was told.
fn output(request: &Request, started: &Started, at: u32) -> Option<u32> {
    let output = (at as usize).checked_sub(request.prompt.len())?;
    started.outputs.get(output).copied().filter(|&token| token != UNKNOWN_TOKEN)
}
