//! Completion: `complete` is the only call that changes the counts of a request.

use std::sync::Arc;

use super::completion::{Completion, Finish, Tokens};
use super::request::{Request, RequestState, RunningRequest};
use super::running::RunningRequests;
use super::scheduler::{ExclusiveScheduler, InFlight};
use crate::config::TOKENS_MAX;
use crate::decide::{Kind, WorstCase};
use crate::error::Error;
use crate::request::{Row, Sequence, Slab, UNKNOWN_TOKEN};

impl InFlight {
    /// Whether the request of the row at `at` ended since the step was planned.
    pub(super) fn is_dropped(&self, at: usize, requests: &Slab<Request>) -> bool {
        let is_running = |row: Row| requests.get(row).is_some_and(|request| request.state == RequestState::Running);
        self.any_ended && self.step.rows.get(at).is_some_and(|&row| !is_running(row))
    }

    /// Return the positions in the step of the rows with a running request.
    fn live_rows<'a>(&'a self, requests: &'a Slab<Request>) -> impl Iterator<Item = usize> + 'a {
        (0..self.step.rows.len()).filter(|&at| !self.is_dropped(at, requests))
    }

    /// Return for each live row its position in the step and among the running requests. Both are ascending.
    fn live_positions<'a>(
        &'a self,
        requests: &'a Slab<Request>,
        running: &'a RunningRequests,
    ) -> impl Iterator<Item = (usize, usize)> + 'a {
        let mut from = 0;
        self.live_rows(requests).map(move |at| {
            let position = self.position(at, from, running);
            from = position + 1;
            (at, position)
        })
    }

    /// Return the position among the running requests of the row at `at`, which is `from` or later.
    fn position(&self, at: usize, from: usize, running: &RunningRequests) -> usize {
        if let Some(first) = self.first {
            return first + at;
        }
        let found = running.rows()[from..].iter().position(|&row| row == self.step.rows[at]);
        from + found.expect("a live row is among the running requests")
    }
}

impl ExclusiveScheduler {
    /// Complete the step with id `step` and return the emitted tokens.
    ///
    /// Returns [`Error::NotDue`] if another step is due, and [`Error::Invalid`] if `tokens` does not match the step.
    pub fn complete(&mut self, step: u64, tokens: Tokens<'_>) -> Result<&Arc<Completion>, Error> {
        let in_flight = self.due(step)?;
        self.check_tokens(in_flight, tokens)?;
        Ok(self.apply(tokens, 1))
    }

    /// Number of identical decode steps guaranteed to follow, including the one in flight, if no request is added or
    /// cancelled; 1 if the step that is due is not a decode step.
    pub fn decode_horizon(&self) -> u32 {
        self.in_flight.front().map_or(1, |in_flight| in_flight.horizon)
    }

    /// Complete the decode step with id `step` and the `times - 1` identical steps after it, and return the outcomes of
    /// the last one.
    ///
    /// The result equals that of planning and completing each step. Returns [`Error::Invalid`] if `times` is above
    /// [`ExclusiveScheduler::decode_horizon`].
    pub fn complete_decodes(&mut self, step: u64, times: u32) -> Result<&Arc<Completion>, Error> {
        let in_flight = self.due(step)?;
        let horizon = in_flight.horizon;
        if !(1..=horizon).contains(&times) {
            return Err(Error::invalid(
                "times",
                times,
                format!("a whole number from 1 to {horizon}, the decode horizon"),
            ));
        }
        self.check_tokens(in_flight, Tokens::LeftOut)?;
        self.allocate_due_blocks(self.running.next_clock(), times - 1);
        Ok(self.apply(Tokens::LeftOut, times))
    }

    fn due(&self, step: u64) -> Result<&InFlight, Error> {
        match self.in_flight.front() {
            Some(in_flight) if in_flight.step.id == step => Ok(in_flight),
            _ if self.in_flight.iter().any(|in_flight| in_flight.step.id == step) => {
                Err(Error::NotDue("step: planned ahead: expected the step before it to be completed first"))
            }
            _ => Err(Error::NotDue("step: completed or planned again already: expected the oldest step in flight")),
        }
    }

    /// Check that each emitting row has a token id where one is needed, and that no other row has one.
    fn check_tokens(&self, in_flight: &InFlight, tokens: Tokens<'_>) -> Result<(), Error> {
        let step = &*in_flight.step;
        let fault = |value: String, expected: &str| Err(Error::invalid("tokens", value, expected));
        if let Tokens::Given(given) = tokens {
            if given.len() != step.rows.len() {
                return fault(format!("{} entries", given.len()), &format!("one for each of {} rows", step.rows.len()));
            }
            if let Some(id) = given.iter().flatten().find(|&&id| id > TOKENS_MAX) {
                return fault(id.to_string(), &format!("token ids from 0 to {TOKENS_MAX}"));
            }
        }
        if matches!(tokens, Tokens::LeftOut) && !self.running.any_needs_tokens() {
            return Ok(());
        }
        for (at, position) in in_flight.live_positions(&self.requests, &self.running) {
            match tokens.get(at) {
                Some(id) if !step.emits(at) => {
                    return fault(
                        format!("{id} at position {at}"),
                        "None for a chunk that is not the last of its prompt",
                    );
                }
                None if self.running.get(position).needs_tokens && step.emits(at) => {
                    return fault(
                        format!("None at position {at}"),
                        "a token id, because the prompt was given as token ids",
                    );
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Add the tokens of the step that is due to the counts `times` times, end the finished requests, and return the
    /// completion.
    fn apply(&mut self, tokens: Tokens<'_>, times: u32) -> &Arc<Completion> {
        let in_flight = self.in_flight.pop_front().expect("a step is due");
        let last = self.completion.take().filter(|last| Arc::strong_count(last) == 1);
        let mut completion = last.unwrap_or_default();
        let record = Arc::get_mut(&mut completion).expect("no caller holds the completion");
        record.reset(tokens);
        if let Tokens::Given(given) = tokens {
            self.emit(&in_flight, given, &mut record.finishes);
        }
        self.advance(&in_flight, times, record);
        if self.kv.has_prefix_caching() {
            self.index_blocks(&in_flight);
        }
        self.phase = self.phase.completed(in_flight.decision);
        self.reported.extend(self.ended.drain(..in_flight.step.finished.len()));
        self.end(&in_flight, &record.finishes);
        self.start_decoding();
        let step = in_flight.step;
        if self.running.is_empty() && self.queue.is_empty() {
            self.state = Kind::Idle;
        } else if !step.rows.is_empty() {
            self.state = step.kind;
        }
        self.spare.push(std::mem::replace(&mut record.step, step));
        debug_assert_eq!(self.check(), Ok(()));
        self.completion.insert(completion)
    }

    /// Store the given output tokens, and record the requests that a stop token ends.
    fn emit(&mut self, in_flight: &InFlight, given: &[Option<u32>], finishes: &mut Vec<(usize, Finish)>) {
        for (at, position) in in_flight.live_positions(&self.requests, &self.running) {
            let Some(token) = given[at] else { continue };
            let entry = self.running.get(position);
            let before = RunningRequest::generated(entry.computed, entry.prompt_len) as usize;
            let outputs = &mut self.started[entry.slot as usize].outputs;
            outputs.resize(before, UNKNOWN_TOKEN);
            outputs.push(token);
            if self.request(entry.row).stop_token_ids.contains(&token) {
                finishes.push((at, Finish::Stop));
            }
        }
    }

    /// Move the counts, and record the rows without a token and the requests that have reached their end.
    fn advance(&mut self, in_flight: &InFlight, times: u32, record: &mut Completion) {
        let step = &*in_flight.step;
        let stops = record.finishes.len();
        match step.kind {
            Kind::Idle => {}
            // Every decoding request is in the decode step that is due.
            Kind::Decode => {
                if self.running.complete_decode(times) {
                    self.record_at_end(in_flight, &mut record.finishes);
                }
            }
            Kind::Prefill => {
                let mut from = 0;
                for at in in_flight.live_rows(&self.requests) {
                    let position = in_flight.position(at, from, &self.running);
                    from = position + 1;
                    if self.running.complete_prefill(position, step.tokens(at)) {
                        record.finishes.push((at, Finish::Length));
                    } else if !step.emits(at) {
                        record.without_token.push(at);
                    }
                }
            }
        }
        if stops > 0 {
            // A stop token wins over the length: the sort is stable, and the stops come first.
            record.finishes.sort_by_key(|&(at, _)| at);
            record.finishes.dedup_by_key(|&mut (at, _)| at);
        }
        if in_flight.any_ended {
            record.without_token.extend((0..step.rows.len()).filter(|&at| in_flight.is_dropped(at, &self.requests)));
            record.without_token.sort_unstable();
        }
    }

    /// Record the requests of a decode step that have reached their end.
    fn record_at_end(&mut self, in_flight: &InFlight, finishes: &mut Vec<(usize, Finish)>) {
        self.positions.clear();
        self.running.take_at_end(&mut self.positions);
        if let Some(first) = in_flight.first {
            finishes.extend(self.positions.iter().map(|position| (position - first, Finish::Length)));
        } else {
            let mut at_end = self.positions.iter().copied().peekable();
            let live = in_flight.live_positions(&self.requests, &self.running);
            let finished = live.filter(|&(_, position)| at_end.next_if_eq(&position).is_some());
            finishes.extend(finished.map(|(at, _)| (at, Finish::Length)));
        }
    }

    /// Move the requests with a computed prompt to the decoding requests.
    fn start_decoding(&mut self) {
        let WorstCase { lookahead, block_size, .. } = self.worst_case;
        while let Some((slot, computed, end_at)) = self.running.start_decoding() {
            let started = &mut self.started[slot as usize];
            started.end_at = end_at;
            if started.may_grow(self.worst_case) {
                let spare = started.kv_slots(block_size) - lookahead - computed;
                started.next_block_at = self.running.clock() + u64::from(spare);
                self.blocks_due.group(started.next_block_at).push(slot);
            }
        }
    }

    /// Add the blocks that the step has filled to the prefix index. Not earlier: another request must not read KV
    /// entries before the step that writes them has run.
    fn index_blocks(&mut self, in_flight: &InFlight) {
        let block_size = self.worst_case.block_size;
        for (at, position) in in_flight.live_positions(&self.requests, &self.running) {
            let entry = self.running.get(position);
            let full = entry.computed / block_size;
            if full == in_flight.step.computed(at) / block_size {
                continue;
            }
            let request = self.requests.get(entry.row).expect("a running request is alive");
            let started = &mut self.started[entry.slot as usize];
            let sequence = Sequence { prompt: &request.prompt, outputs: &started.outputs };
            while started.indexed < full {
                let block = started.blocks[started.indexed as usize];
                let Some(content) = self.kv.index_block(&sequence, started.indexed, started.content, block) else {
                    // A block after one of unknown content can never be found.
                    started.indexed = u32::MAX;
                    break;
                };
                started.content = content;
                started.indexed += 1;
            }
        }
    }

    /// Remove the requests that finished in the step, in batch order.
    fn end(&mut self, in_flight: &InFlight, finishes: &[(usize, Finish)]) {
        if finishes.is_empty() {
            return;
        }
        let mut from = 0;
        let position = |&(at, _): &(usize, Finish)| {
            let position = in_flight.position(at, from, &self.running);
            from = position + 1;
            position
        };
        self.positions.clear();
        self.positions.extend(finishes.iter().map(position));
        let mut removed = std::mem::take(&mut self.removed);
        self.running.remove(&self.positions, &mut removed);
        for (entry, &(_, finish)) in removed.iter().zip(finishes) {
            self.release(entry, Some(finish));
            self.ended.push(entry.row);
        }
        removed.clear();
        self.removed = removed;
    }
}
