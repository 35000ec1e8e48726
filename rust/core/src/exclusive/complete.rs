//! Completing a step: the only way in which counts move.

use std::sync::Arc;

use super::completion::{Completion, Finish, Tokens};
use super::request::{Place, Request};
use super::running::{Lane, Lanes};
use super::scheduler::{ExclusiveScheduler, Pending};
use crate::config::TOKENS_MAX;
use crate::decide::{Kind, WorstCase};
use crate::error::Error;
use crate::request::{Row, Rows, Sequence, UNKNOWN_TOKEN};

impl Pending {
    /// Whether the request of the row at `at` ended since the step was planned.
    pub(super) fn is_dropped(&self, at: usize, requests: &Rows<Request>) -> bool {
        let runs = |row: Row| requests.get(row).is_some_and(|request| request.place == Place::Running);
        self.disturbed && self.step.rows.get(at).is_some_and(|&row| !runs(row))
    }

    /// Positions in the step of the rows that are still there.
    fn rows_left<'a>(&'a self, requests: &'a Rows<Request>) -> impl Iterator<Item = usize> + 'a {
        (0..self.step.rows.len()).filter(|&at| !self.is_dropped(at, requests))
    }

    /// Those, each with its place among the running requests. Both keep the order of admission.
    fn live<'a>(&'a self, requests: &'a Rows<Request>, lanes: &'a Lanes) -> impl Iterator<Item = (usize, usize)> + 'a {
        let mut from = 0;
        self.rows_left(requests).map(move |at| {
            let place = self.place(at, from, lanes);
            from = place + 1;
            (at, place)
        })
    }

    /// The place among the running requests of the row at `at`, which is not before `from`.
    fn place(&self, at: usize, from: usize, lanes: &Lanes) -> usize {
        if let Some(first) = self.first {
            return first + at;
        }
        let found = lanes.rows()[from..].iter().position(|&row| row == self.step.rows[at]);
        from + found.expect("a row that did not end has a lane")
    }
}

impl ExclusiveScheduler {
    /// Completes the step with that number, which must be the one that is due. A refused call changes
    /// nothing.
    pub fn complete(&mut self, step: u64, tokens: Tokens<'_>) -> Result<&Arc<Completion>, Error> {
        let pending = self.due(step)?;
        self.check_tokens(pending, tokens)?;
        Ok(self.apply(tokens, 1))
    }

    /// How many decode steps in a row, the one that is due included, are certain to be equal as long as
    /// nobody is added or cancelled; 1 when the step that is due is no decode step.
    pub fn decode_horizon(&self) -> u32 {
        self.pending.front().map_or(1, |pending| pending.horizon)
    }

    /// Completes a decode step and plans and completes it again until it has run `times` times, at most
    /// [`ExclusiveScheduler::decode_horizon`]. Leaves the same state as step by step; the outcomes are
    /// those of the last step.
    pub fn complete_decodes(&mut self, step: u64, times: u32) -> Result<&Arc<Completion>, Error> {
        let pending = self.due(step)?;
        let horizon = pending.horizon;
        if !(1..=horizon).contains(&times) {
            return Err(Error::invalid("times", times, format!("from 1 to the horizon, {horizon}")));
        }
        self.check_tokens(pending, Tokens::LeftOut)?;
        self.turn_wheel(self.lanes.next_clock(), times - 1);
        Ok(self.apply(Tokens::LeftOut, times))
    }

    fn due(&self, step: u64) -> Result<&Pending, Error> {
        match self.pending.front() {
            Some(pending) if pending.step.id == step => Ok(pending),
            _ if self.pending.iter().any(|pending| pending.step.id == step) => {
                Err(Error::NotDue("step: planned ahead: the step before it must be completed first"))
            }
            _ => Err(Error::NotDue("step: not the one that is due: it was completed already, or planned again since")),
        }
    }

    fn check_tokens(&self, pending: &Pending, tokens: Tokens<'_>) -> Result<(), Error> {
        let step = &*pending.step;
        let fault = |value: String, expected: &str| Err(Error::invalid("tokens", value, expected));
        if let Tokens::Given(given) = tokens {
            if given.len() != step.rows.len() {
                return fault(format!("{} entries", given.len()), &format!("one for each of {} rows", step.rows.len()));
            }
            if let Some(id) = given.iter().flatten().find(|&&id| id > TOKENS_MAX) {
                return fault(id.to_string(), &format!("token ids from 0 to {TOKENS_MAX}"));
            }
        }
        if matches!(tokens, Tokens::LeftOut) && !self.lanes.any_told() {
            return Ok(());
        }
        for (at, lane) in pending.live(&self.requests, &self.lanes) {
            match tokens.get(at) {
                Some(id) if !step.emits(at) => {
                    return fault(format!("{id} at position {at}"), "None for a chunk that does not end its prompt");
                }
                None if self.lanes.get(lane).told && step.emits(at) => {
                    return fault(format!("None at position {at}"), "a token id, since the prompt was given as ids");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Moves the counts of the step that is due by `times` of its tokens, ends who has all it may have,
    /// and hands out what came of it.
    fn apply(&mut self, tokens: Tokens<'_>, times: u32) -> &Arc<Completion> {
        let pending = self.pending.pop_front().expect("a step is due");
        let last = self.completion.take().filter(|last| Arc::strong_count(last) == 1);
        let mut completion = last.unwrap_or_default();
        let record = Arc::get_mut(&mut completion).expect("nobody else holds it");
        record.start(tokens);
        if let Tokens::Given(given) = tokens {
            self.emit(&pending, given, &mut record.finishes);
        }
        self.advance(&pending, times, record);
        if self.kv.shares() {
            self.offer_blocks(&pending);
        }
        self.phase = self.phase.completed(pending.decision);
        self.delivered.extend(self.ended.drain(..pending.step.finished.len()));
        self.end(&pending, &record.finishes);
        self.join();
        let step = pending.step;
        if self.lanes.is_empty() && self.queue.is_empty() {
            self.state = Kind::Idle;
        } else if !step.rows.is_empty() {
            self.state = step.kind;
        }
        self.spare.push(std::mem::replace(&mut record.step, step));
        debug_assert_eq!(self.check(), Ok(()));
        self.completion.insert(completion)
    }

    /// Keeps the tokens that were told, and notes whom a stop token ends.
    fn emit(&mut self, pending: &Pending, given: &[Option<u32>], finishes: &mut Vec<(usize, Finish)>) {
        for (at, lane) in pending.live(&self.requests, &self.lanes) {
            let Some(token) = given[at] else { continue };
            let lane = self.lanes.get(lane);
            let before = Lane::generated(lane.computed, lane.prompt) as usize;
            let outputs = &mut self.started[lane.seat as usize].outputs;
            outputs.resize(before, UNKNOWN_TOKEN);
            outputs.push(token);
            if self.request(lane.row).stop_token_ids.contains(&token) {
                finishes.push((at, Finish::Stop));
            }
        }
    }

    /// Moves the counts, and notes who emitted nothing and who has emitted all it may.
    fn advance(&mut self, pending: &Pending, times: u32, record: &mut Completion) {
        let step = &*pending.step;
        let stops = record.finishes.len();
        match step.kind {
            Kind::Idle => {}
            // Whoever decodes is in a decode step that is due.
            Kind::Decode => {
                if self.lanes.tick(times) {
                    self.take_spent(pending, &mut record.finishes);
                }
            }
            Kind::Prefill => {
                let mut from = 0;
                for at in pending.rows_left(&self.requests) {
                    let place = pending.place(at, from, &self.lanes);
                    from = place + 1;
                    if self.lanes.advance(place, step.tokens(at)) {
                        record.finishes.push((at, Finish::Length));
                    } else if !step.emits(at) {
                        record.silent.push(at);
                    }
                }
            }
        }
        if stops > 0 {
            // Stop wins: the sort is stable, and the stops stand first.
            record.finishes.sort_by_key(|&(at, _)| at);
            record.finishes.dedup_by_key(|&mut (at, _)| at);
        }
        if pending.disturbed {
            record.silent.extend((0..step.rows.len()).filter(|&at| pending.is_dropped(at, &self.requests)));
            record.silent.sort_unstable();
        }
    }

    fn take_spent(&mut self, pending: &Pending, finishes: &mut Vec<(usize, Finish)>) {
        self.places.clear();
        self.lanes.take_spent(&mut self.places);
        if let Some(first) = pending.first {
            finishes.extend(self.places.iter().map(|place| (place - first, Finish::Length)));
        } else {
            let mut spent = self.places.iter().copied().peekable();
            let done =
                pending.live(&self.requests, &self.lanes).filter(|&(_, place)| spent.next_if_eq(&place).is_some());
            finishes.extend(done.map(|(at, _)| (at, Finish::Length)));
        }
    }

    /// Lets those whose prompt is done decode from now on.
    fn join(&mut self) {
        let WorstCase { lookahead, block_size, .. } = self.worst_case;
        while let Some((seat, computed, end_at)) = self.lanes.join() {
            let started = &mut self.started[seat as usize];
            started.end_at = end_at;
            if started.may_grow(self.worst_case) {
                let spare = started.slots(block_size) - lookahead - computed;
                started.need_at = self.lanes.clock() + u64::from(spare);
                self.wheel.slot(started.need_at).push(seat);
            }
        }
    }

    /// Offers the blocks that the step has filled to requests that start later. Not sooner: what a step
    /// has not written yet must not be read by another.
    fn offer_blocks(&mut self, pending: &Pending) {
        let block_size = self.worst_case.block_size;
        for (at, lane) in pending.live(&self.requests, &self.lanes) {
            let lane = self.lanes.get(lane);
            let full = lane.computed / block_size;
            if full == pending.step.computed(at) / block_size {
                continue;
            }
            let request = self.requests.get(lane.row).expect("a running request is alive");
            let started = &mut self.started[lane.seat as usize];
            let sequence = Sequence { prompt: &request.prompt, outputs: &started.outputs };
            while started.offered < full {
                let block = started.blocks[started.offered as usize];
                let Some(content) = self.kv.offer(&sequence, started.offered, started.content, block) else {
                    // Behind a block of unknown content no other can be found.
                    started.offered = u32::MAX;
                    break;
                };
                started.content = content;
                started.offered += 1;
            }
        }
    }

    /// Takes out who ended in the step, in batch order.
    fn end(&mut self, pending: &Pending, finishes: &[(usize, Finish)]) {
        if finishes.is_empty() {
            return;
        }
        let mut from = 0;
        let place = |&(at, _): &(usize, Finish)| {
            let place = pending.place(at, from, &self.lanes);
            from = place + 1;
            place
        };
        self.places.clear();
        self.places.extend(finishes.iter().map(place));
        let mut gone = std::mem::take(&mut self.gone);
        self.lanes.remove(&self.places, &mut gone);
        for (lane, &(_, finish)) in gone.iter().zip(finishes) {
            self.leave(lane, Some(finish));
            self.ended.push(lane.row);
        }
        gone.clear();
        self.gone = gone;
    }
}
