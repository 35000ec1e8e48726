//! Planning: `schedule` admits requests, allocates KV blocks and fills the step.

use std::sync::Arc;

use super::request::{RequestState, RunningRequest, Started};
use super::scheduler::{ExclusiveScheduler, InFlight};
use crate::decide::{Candidate, Chunk, Decision, Kind, Pack, Step, Wait, check_step};
use crate::error::Error;
use crate::request::{Prompt, Row, Sequence};

/// Most steps kept for reuse: a caller may still hold the last completed step, and a discarded one.
const SPARE_MAX: usize = 4;

/// Most blocks and outputs for which memory is allocated when a request starts.
const PREALLOCATED_MAX: u32 = 1 << 16;

/// How to plan a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Plan no prefill while a request can decode.
    pub throttle_prefills: bool,
    /// Plan one step beyond the step in flight, on the assumption that each of its emitting rows emits a token.
    pub ahead: bool,
}

impl ExclusiveScheduler {
    /// Plan the next step.
    ///
    /// Admits requests and allocates KV blocks at once. Without `ahead`, steps in flight are discarded first; the
    /// requests that they admitted stay admitted. Returns [`Error::NotDue`] if one step is planned ahead already.
    pub fn schedule(&mut self, options: Options) -> Result<&Arc<Step>, Error> {
        if options.ahead && self.in_flight.len() == 2 {
            let fault = "ahead: one step ahead is planned: expected complete() of the step in flight first";
            return Err(Error::NotDue(fault));
        }
        if !options.ahead {
            self.discard_in_flight();
        }
        self.forget_reported();
        let phase = self.in_flight.front().map_or(self.phase, |in_flight| self.phase.completed(in_flight.decision));
        let decision = self.decide(&phase, options.throttle_prefills);
        let mut step = self.fresh_step();
        let planned = Arc::get_mut(&mut step).expect("a fresh step is not shared");
        let (mut horizon, mut first) = (1, None);
        let head_wait = match decision.kind {
            Kind::Idle => self.head_wait(decision),
            Kind::Prefill => {
                let (head_wait, at) = self.plan_prefill(planned)?;
                first = Some(at);
                head_wait
            }
            Kind::Decode => {
                horizon = self.plan_decode(planned)?;
                first = Some(0);
                self.head_wait(decision)
            }
        };
        // The next step may be a prefill if a prompt is in progress or the head fits. A head that waits for slots or
        // blocks waits until a running request ends.
        let no_prefill = !self.prefill_in_progress() && matches!(head_wait, None | Some(Wait::Slots | Wait::Kv));
        let repeats = no_prefill && self.in_flight.is_empty();
        let horizon = if repeats { horizon } else { 1 };
        self.invalidate_horizon();
        let head_wait = self.queue.head().zip(head_wait);
        self.in_flight.push_back(InFlight { step, decision, any_ended: false, head_wait, horizon, first });
        debug_assert_eq!(self.check(), Ok(()));
        Ok(&self.in_flight[self.in_flight.len() - 1].step)
    }

    /// The oldest step in flight, which is the next to complete.
    pub fn due_step(&self) -> Option<&Arc<Step>> {
        self.in_flight.front().map(|in_flight| &in_flight.step)
    }

    /// Return why the head is not admitted by a step that is not a prefill.
    fn head_wait(&self, decision: Decision) -> Option<Wait> {
        let (_, refused) = self.refused_head()?;
        Some(refused.unwrap_or(if decision.interleaved { Wait::Interleave } else { Wait::Throttled }))
    }

    /// Fill `step` with prompt tokens. Returns why the head of the queue is not admitted, and the position of the
    /// step's first row among the running requests.
    fn plan_prefill(&mut self, step: &mut Step) -> Result<(Option<Wait>, usize), Error> {
        let (first, head_wait) = if self.prefill_in_progress() {
            (self.running.projected_decoding(), self.queue.head().map(|_| Wait::PrefillInProgress))
        } else {
            let first = self.running.len();
            (first, self.start_prompts())
        };
        let num_requests = self.running.len() + self.queue.len();
        let mut pack = Pack::new(self.prefills_max);
        let fits = |entry: &RunningRequest| pack.add(&self.chunker, entry.rest(), num_requests);
        let together = self.running.iter_from(first).take_while(fits).count();
        for at in first..first + together {
            let entry = self.running.get(at);
            let (rest, uncomputed) = (entry.rest(), entry.prompt_len - entry.projected());
            let tokens = if together > 1 { uncomputed } else { self.chunker.chunk(rest, num_requests).min(uncomputed) };
            step.rows.push(entry.row);
            step.slots.push(entry.slot);
            step.computed.push(entry.projected());
            step.chunks.push(Chunk { tokens, last: tokens == uncomputed });
        }
        step.kind = Kind::Prefill;
        step.padded = self.token_buckets.fit(step.total())?;
        let entries = self.running.iter_from(first);
        let rows = step.chunks.iter().zip(entries).map(|(chunk, entry)| (entry.prefilling(), i64::from(chunk.tokens)));
        check_step(step.kind, step.padded, 1, rows, |at| step.rows[at].index())?;
        for (at, chunk) in step.chunks.iter().enumerate() {
            self.running.plan(first + at, chunk.tokens);
            self.allocate_kv_slots(first + at);
        }
        Ok((head_wait, first))
    }

    /// Admit as many heads of the queue as fit one step. Returns why the next head is not admitted.
    fn start_prompts(&mut self) -> Option<Wait> {
        let mut pack = Pack::new(self.prefills_max);
        while let Some(row) = self.queue.head() {
            let request = self.request(row);
            let num_requests = self.running.len() + self.queue.len();
            let batch_full = !pack.add(&self.chunker, RunningRequest::length(&request.prompt), num_requests);
            let candidate = Candidate { needed_blocks: request.needed_blocks, batch_full, ..Candidate::default() };
            if let Some(refused) = self.ledger.refuse(&candidate) {
                return Some(refused);
            }
            self.start(row);
        }
        None
    }

    /// Move `row`, the head of the queue, to the running requests. Its prompt reuses the blocks of the longest cached
    /// prefix.
    fn start(&mut self, row: Row) {
        let popped = self.queue.pop();
        assert_eq!(popped, Some(row), "only the head is admitted");
        let request = self.requests.get_mut(row).expect("a waiting request is alive");
        request.state = RequestState::Running;
        self.ledger.admit(row, request.needed_blocks);
        let prompt_len = RunningRequest::length(&request.prompt);
        let needs_tokens = matches!(request.prompt, Prompt::Tokens(_));
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.started.push(Started::default());
            u32::try_from(self.started.len() - 1).expect("fewer than 2^32 live requests")
        });
        request.slot = Some(slot);
        let started = &mut self.started[slot as usize];
        started.blocks.clear();
        started.outputs.clear();
        (started.prompt_len, started.sampling) = (prompt_len, request.sampling);
        // Memory for the worst case now, so that decoding never allocates.
        started.blocks.reserve(request.needed_blocks.min(PREALLOCATED_MAX) as usize);
        started.outputs.reserve(if needs_tokens { request.outputs_max.min(PREALLOCATED_MAX) as usize } else { 0 });
        let sequence = Sequence { prompt: &request.prompt, outputs: &[] };
        started.content = self.kv.share(&sequence, prompt_len - 1, &mut started.blocks);
        started.indexed = u32::try_from(started.blocks.len()).expect("blocks are counted in 32 bits");
        let hit = started.indexed * self.worst_case.block_size;
        let end = prompt_len + request.outputs_max - 1;
        self.running.push(RunningRequest {
            row,
            slot,
            prompt_len,
            end,
            hit,
            computed: hit,
            planned: 0,
            decoding: false,
            needs_tokens,
        });
    }

    /// Fill `step` with one token of each request that can decode. Returns the number of steps in a row that the same
    /// requests can decode.
    fn plan_decode(&mut self, step: &mut Step) -> Result<u32, Error> {
        let decoding = self.running.projected_decoding();
        step.kind = Kind::Decode;
        // A request that reaches its end in the step in flight is not in this one, so the rows are not contiguous.
        let gap = self.running.any_at_end(decoding);
        if gap {
            let ready = || self.running.iter().filter(RunningRequest::ready);
            step.rows.extend(ready().map(|entry| entry.row));
            step.slots.extend(ready().map(|entry| entry.slot));
            step.computed.extend(ready().map(|entry| entry.projected()));
        } else {
            step.rows.extend_from_slice(&self.running.rows()[..decoding]);
            step.slots.extend_from_slice(&self.running.slots()[..decoding]);
            step.computed.extend(self.running.projected(decoding));
        }
        step.padded = self.seqs_buckets.fit(step.total())?;
        let name = |at: usize| step.rows[at].index();
        if gap {
            let rows = self.running.iter().filter(RunningRequest::ready).map(|entry| (entry.prefilling(), 1));
            check_step(step.kind, step.padded, 1, rows, name)?;
        } else {
            let rows = self.running.prefilling(decoding).map(|prefilling| (prefilling, 1));
            check_step(step.kind, step.padded, 1, rows, name)?;
        }
        let horizon = if gap { 1 } else { self.running.horizon() };
        self.allocate_due_blocks(self.running.next_clock(), 1);
        for at in self.running.decoding()..decoding {
            if self.running.get(at).ready() {
                self.running.plan(at, 1);
                self.allocate_kv_slots(at);
            }
        }
        self.running.plan_decode();
        Ok(horizon)
    }

    /// Allocate the blocks that decoding requests need in the `steps` decode steps from `clock` on, step by step and in
    /// batch order.
    pub(super) fn allocate_due_blocks(&mut self, clock: u64, steps: u32) {
        let Self { blocks_due, started, kv, worst_case, .. } = self;
        blocks_due.visit(clock, steps, |clock, group| {
            group.retain(|&slot| {
                let started = &mut started[slot as usize];
                // The block is not due yet if a discarded step allocated it, and not needed if the request ends
                // before this step.
                if started.next_block_at == clock && started.end_at > clock {
                    kv.allocate(1, &mut started.blocks);
                    started.next_block_at += u64::from(worst_case.block_size);
                }
                started.may_grow(*worst_case)
            });
        });
    }

    /// Allocate the blocks for the planned tokens of the request at `at`.
    fn allocate_kv_slots(&mut self, at: usize) {
        let entry = self.running.get(at);
        let needed = self.worst_case.kv_slots_for(entry.projected());
        let started = &mut self.started[entry.slot as usize];
        let allocated = started.kv_slots(self.worst_case.block_size);
        if needed > allocated {
            self.kv.allocate((needed - allocated).div_ceil(self.worst_case.block_size), &mut started.blocks);
        }
    }

    /// Discard the steps in flight. Their requests stay admitted and keep their blocks.
    fn discard_in_flight(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        for in_flight in self.in_flight.drain(..) {
            self.spare.push(in_flight.step);
        }
        self.running.discard_planned();
    }

    /// Remove the requests that the last completed step reported as ended.
    fn forget_reported(&mut self) {
        for row in self.reported.drain(..) {
            let request = self.requests.remove(row);
            self.free_slots.extend(request.and_then(|request| request.slot));
        }
    }

    /// Return an empty step with the next id and the ended requests that it reports. Reuses the memory of a step that
    /// no caller holds.
    fn fresh_step(&mut self) -> Arc<Step> {
        let unheld = self.spare.iter().position(|step| Arc::strong_count(step) == 1);
        let mut step = unheld.map(|at| self.spare.swap_remove(at)).unwrap_or_default();
        // A step that a caller still holds lives on with that caller.
        self.spare.truncate(SPARE_MAX);
        let fresh = Arc::get_mut(&mut step).expect("no caller holds the step");
        fresh.clear();
        fresh.id = self.next_step;
        self.next_step += 1;
        let reporting: usize = self.in_flight.iter().map(|in_flight| in_flight.step.finished.len()).sum();
        fresh.finished.extend_from_slice(&self.ended[reporting..]);
        step
    }
}
