//! The rows of a step, from which tensors are filled.

use super::request::RequestState;
use super::scheduler::ExclusiveScheduler;
use crate::decide::Step;
use crate::fill::{DecodeRow, PrefillRow};
use crate::request::{Prompt, Row};

/// Why the tensors of a step cannot be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfilled {
    /// The step is too old: its blocks may belong to other requests now.
    TooOld,
    /// The token ids of the row at this position are unknown.
    Unknown(usize),
    /// The caller gave a token for the row at this position that differs from the known one, the second field.
    Mismatch(usize, u32),
}

impl ExclusiveScheduler {
    /// Return the KV blocks that the row at `at` of `step` had when the step was planned, or `None` if the request was
    /// removed since.
    pub fn step_blocks(&self, step: &Step, at: usize) -> Option<&[u32]> {
        self.requests.get(step.rows[at])?;
        Some(self.first_blocks(step.slots[at], step.computed(at) + step.tokens(at)))
    }

    /// Return the row at `at` of a prefill step.
    pub fn prefill_row<'a>(&'a self, step: &Step, at: usize) -> Result<PrefillRow<'a>, Unfilled> {
        let request = self.requests.get(step.rows[at]).ok_or(Unfilled::TooOld)?;
        if !self.blocks_intact(step.rows[at], self.is_in_flight(step)) {
            return Err(Unfilled::TooOld);
        }
        let Prompt::Tokens(ids) = &request.prompt else { return Err(Unfilled::Unknown(at)) };
        let (start, tokens) = (step.computed(at), step.tokens(at));
        let blocks = self.first_blocks(step.slots[at], start + tokens);
        let tokens = &ids[start as usize..][..tokens as usize];
        Ok(PrefillRow { tokens, start, blocks, sampling: request.sampling })
    }

    /// Check that the token of every row of a decode step is known, so that [`ExclusiveScheduler::decode_rows`] can
    /// return it. `given` has one entry per row: the token, or `None` if the scheduler knows it.
    pub fn check_decodes(&self, step: &Step, given: Option<&[Option<u32>]>) -> Result<(), Unfilled> {
        let Some(given) = given else {
            // The outputs of a request with `needs_tokens` are always known, so no row needs a check.
            let due = self.in_flight.front().filter(|in_flight| in_flight.step.id == step.id);
            if due.is_some_and(|due| !due.any_ended) && self.running.all_need_tokens() {
                return Ok(());
            }
            return self.unknown_decodes(step)?.next().map_or(Ok(()), |at| Err(Unfilled::Unknown(at)));
        };
        for (at, (known, &given)) in self.outputs(step)?.zip(given).enumerate() {
            match (known, given) {
                (None, None) => return Err(Unfilled::Unknown(at)),
                (Some(known), Some(given)) if known != given => return Err(Unfilled::Mismatch(at, known)),
                (Some(_), _) | (None, Some(_)) => {}
            }
        }
        Ok(())
    }

    /// Return the positions of the rows of a decode step with a token that the scheduler does not know.
    pub fn unknown_decodes<'a>(&'a self, step: &'a Step) -> Result<impl Iterator<Item = usize> + 'a, Unfilled> {
        Ok(self.outputs(step)?.enumerate().filter(|(_, known)| known.is_none()).map(|(at, _)| at))
    }

    /// Return the token of each row of a decode step, or `None` if the scheduler does not know it.
    fn outputs<'a>(&'a self, step: &'a Step) -> Result<impl Iterator<Item = Option<u32>> + 'a, Unfilled> {
        let in_flight = self.is_in_flight(step);
        if !step.rows.iter().all(|&row| self.blocks_intact(row, in_flight)) {
            return Err(Unfilled::TooOld);
        }
        let outputs = step.slots.iter().zip(&step.computed);
        Ok(outputs.map(|(&slot, &position)| self.started[slot as usize].output(position)))
    }

    /// Return the tokens of a decode step that [`ExclusiveScheduler::check_decodes`] accepted with the same `given`.
    pub fn decode_tokens<'a>(
        &'a self,
        step: &'a Step,
        given: Option<&'a [Option<u32>]>,
    ) -> impl Iterator<Item = u32> + 'a {
        step.slots.iter().zip(&step.computed).enumerate().map(move |(at, (&slot, &position))| {
            let given = || given.and_then(|given| given[at]);
            self.started[slot as usize].output(position).or_else(given).expect("the step was checked")
        })
    }

    /// Return the rows of a decode step that [`ExclusiveScheduler::check_decodes`] accepted with the same `given`.
    pub fn decode_rows<'a>(
        &'a self,
        step: &'a Step,
        given: Option<&'a [Option<u32>]>,
    ) -> impl Iterator<Item = DecodeRow<'a>> {
        let rows = step.slots.iter().zip(&step.computed);
        rows.zip(self.decode_tokens(step, given)).map(|((&slot, &position), token)| {
            let sampling = self.started[slot as usize].sampling;
            DecodeRow { token, position, blocks: self.first_blocks(slot, position + 1), sampling, drafts: 0 }
        })
    }

    /// Return the longest context of the rows of a decode step, in tokens, including the token being computed and the
    /// lookahead.
    pub fn decode_context(&self, step: &Step) -> u32 {
        step.computed.iter().max().map_or(0, |&position| self.worst_case.kv_slots_for(position + 1))
    }

    /// Whether `step` is in flight.
    fn is_in_flight(&self, step: &Step) -> bool {
        self.in_flight.iter().any(|in_flight| in_flight.step.id == step.id)
    }

    /// Whether no other request has written to the blocks of `row` since its step was planned. `in_flight` tells
    /// whether that step is in flight: if the request was cancelled meanwhile, its blocks are written only by later
    /// steps.
    fn blocks_intact(&self, row: Row, in_flight: bool) -> bool {
        self.requests.get(row).is_some_and(|request| in_flight || request.state == RequestState::Running)
    }

    /// Return the blocks that hold the first `end` tokens of the request in `slot`, and the lookahead.
    fn first_blocks(&self, slot: u32, end: u32) -> &[u32] {
        &self.started[slot as usize].blocks[..self.worst_case.blocks_for(end) as usize]
    }
}
