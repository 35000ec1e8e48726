//! Planning: `schedule`.

use std::sync::Arc;

use super::request::{Place, Started};
use super::running::Lane;
use super::scheduler::{ExclusiveScheduler, Pending};
use crate::decide::{Candidate, Chunk, Decision, Kind, Pack, Step, Wait, check_step};
use crate::error::Error;
use crate::request::{Prompt, Row, Sequence};

/// Steps kept for their memory: the last completed one may still be held, and so may one that went void.
const SPARE_MAX: usize = 4;

/// Most blocks and outputs for which a request is given room when it starts.
const ROOM_MAX: u32 = 1 << 16;

/// How to plan a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Hold prefills back while there is something to decode.
    pub throttle_prefills: bool,
    /// Plan the step after the pending one, which is taken to emit a token for each emitting row.
    pub ahead: bool,
}

impl ExclusiveScheduler {
    /// Plans the next step: admits, allocates, and says who runs. Unless `ahead` is asked for, planned
    /// steps that were not completed are void; who they admitted stays admitted.
    pub fn schedule(&mut self, options: Options) -> Result<&Arc<Step>, Error> {
        if options.ahead && self.pending.len() == 2 {
            return Err(Error::NotDue("one step ahead is planned already: complete the pending step first"));
        }
        if !options.ahead {
            self.void_pending();
        }
        self.forget_delivered();
        let phase = self.pending.front().map_or(self.phase, |pending| self.phase.completed(pending.decision));
        let decision = self.decide(&phase, options.throttle_prefills);
        let mut step = self.fresh_step();
        let planned = Arc::get_mut(&mut step).expect("a fresh step is not shared");
        let (mut horizon, mut first) = (1, None);
        let left = match decision.kind {
            Kind::Idle => self.head_left(decision),
            Kind::Prefill => {
                let (left, at) = self.plan_prefill(planned)?;
                first = Some(at);
                left
            }
            Kind::Decode => {
                horizon = self.plan_decode(planned)?;
                first = Some(0);
                self.head_left(decision)
            }
        };
        // A head that may start, or a prompt part done, ends the run of equal decode steps.
        let undisturbed = !self.prefill_in_progress() && matches!(left, None | Some(Wait::Slots | Wait::Kv));
        let certain = undisturbed && self.pending.is_empty();
        let horizon = if certain { horizon } else { 1 };
        self.doubt_horizon();
        let left = self.queue.head().zip(left);
        self.pending.push_back(Pending { step, decision, disturbed: false, left, horizon, first });
        debug_assert_eq!(self.check(), Ok(()));
        Ok(&self.pending[self.pending.len() - 1].step)
    }

    /// The planned step that is to be completed next.
    pub fn due_step(&self) -> Option<&Arc<Step>> {
        self.pending.front().map(|pending| &pending.step)
    }

    /// Why the head waits although a step without prefill is taken.
    fn head_left(&self, decision: Decision) -> Option<Wait> {
        let (_, refused) = self.refused_head()?;
        Some(refused.unwrap_or(if decision.interleaved { Wait::Interleave } else { Wait::Throttled }))
    }

    /// Fills `step` with prompt tokens; answers why the next head is not among them, and the position of the
    /// first row among the running requests.
    fn plan_prefill(&mut self, step: &mut Step) -> Result<(Option<Wait>, usize), Error> {
        let (first, left) = if self.prefill_in_progress() {
            (self.lanes.decoding_then(), self.queue.head().map(|_| Wait::PrefillInProgress))
        } else {
            let first = self.lanes.len();
            (first, self.start_prompts())
        };
        let requests = self.lanes.len() + self.queue.len();
        let mut pack = Pack::new(self.prefills_max);
        let fits = |lane: &Lane| pack.add(&self.chunker, lane.rest(), requests);
        let together = self.lanes.iter_from(first).take_while(fits).count();
        for at in first..first + together {
            let lane = self.lanes.get(at);
            let (rest, uncomputed) = (lane.rest(), lane.prompt - lane.projected());
            let tokens = if together > 1 { uncomputed } else { self.chunker.chunk(rest, requests).min(uncomputed) };
            step.rows.push(lane.row);
            step.seats.push(lane.seat);
            step.computed.push(lane.projected());
            step.chunks.push(Chunk { tokens, last: tokens == uncomputed });
        }
        step.kind = Kind::Prefill;
        step.padded = self.token_buckets.fit(step.total())?;
        let lanes = self.lanes.iter_from(first);
        let rows = step.chunks.iter().zip(lanes).map(|(chunk, lane)| (lane.prefilling(), i64::from(chunk.tokens)));
        check_step(step.kind, step.padded, 1, rows, |at| step.rows[at].index())?;
        for (at, chunk) in step.chunks.iter().enumerate() {
            self.lanes.plan(first + at, chunk.tokens);
            self.take_slots(first + at);
        }
        Ok((left, first))
    }

    /// Admits heads of the queue, as many as may start together; answers why the next one may not.
    fn start_prompts(&mut self) -> Option<Wait> {
        let mut pack = Pack::new(self.prefills_max);
        while let Some(row) = self.queue.head() {
            let request = self.request(row);
            let requests = self.lanes.len() + self.queue.len();
            let batch_full = !pack.add(&self.chunker, Lane::length(&request.prompt), requests);
            let candidate = Candidate { need: request.need, batch_full, ..Candidate::default() };
            if let Some(refused) = self.ledger.refuse(&candidate) {
                return Some(refused);
            }
            self.start(row);
        }
        None
    }

    /// Moves the head of the queue, which admission let pass, among the running.
    fn start(&mut self, row: Row) {
        let popped = self.queue.pop();
        assert_eq!(popped, Some(row), "the head is started");
        let request = self.requests.get_mut(row).expect("a row in the queue is alive");
        request.place = Place::Running;
        self.ledger.hold(row, request.need);
        let prompt = Lane::length(&request.prompt);
        let told = matches!(request.prompt, Prompt::Tokens(_));
        let seat = self.vacant.pop().unwrap_or_else(|| {
            self.started.push(Started::default());
            u32::try_from(self.started.len() - 1).expect("fewer than 2^32 live requests")
        });
        request.seat = Some(seat);
        let started = &mut self.started[seat as usize];
        started.blocks.clear();
        started.outputs.clear();
        (started.prompt, started.sampling) = (prompt, request.sampling);
        // Room for all of them now, so that decoding never allocates.
        started.blocks.reserve(request.need.min(ROOM_MAX) as usize);
        started.outputs.reserve(if told { request.outputs_max.min(ROOM_MAX) as usize } else { 0 });
        let sequence = Sequence { prompt: &request.prompt, outputs: &[] };
        started.content = self.kv.share(&sequence, prompt - 1, &mut started.blocks);
        started.offered = u32::try_from(started.blocks.len()).expect("blocks are counted in 32 bits");
        let hit = started.offered * self.worst_case.block_size;
        let end = prompt + request.outputs_max - 1;
        self.lanes.push(Lane { row, seat, prompt, end, hit, computed: hit, planned: 0, decoding: false, told });
    }

    /// Fills `step` with one token of each request that is ready; answers how many steps in a row the
    /// same requests can decode.
    fn plan_decode(&mut self, step: &mut Step) -> Result<u32, Error> {
        let decoding = self.lanes.decoding_then();
        step.kind = Kind::Decode;
        // A request that emits its last token in the pending step is spent: it leaves a gap.
        let gap = self.lanes.any_spent(decoding);
        if gap {
            let ready = || self.lanes.iter().filter(Lane::ready);
            step.rows.extend(ready().map(|lane| lane.row));
            step.seats.extend(ready().map(|lane| lane.seat));
            step.computed.extend(ready().map(|lane| lane.projected()));
        } else {
            step.rows.extend_from_slice(&self.lanes.rows()[..decoding]);
            step.seats.extend_from_slice(&self.lanes.seats()[..decoding]);
            step.computed.extend(self.lanes.projected(decoding));
        }
        step.padded = self.seqs_buckets.fit(step.total())?;
        let name = |at: usize| step.rows[at].index();
        if gap {
            let rows = self.lanes.iter().filter(Lane::ready).map(|lane| (lane.prefilling(), 1));
            check_step(step.kind, step.padded, 1, rows, name)?;
        } else {
            let rows = self.lanes.prefilling(decoding).map(|prefilling| (prefilling, 1));
            check_step(step.kind, step.padded, 1, rows, name)?;
        }
        let horizon = if gap { 1 } else { self.lanes.horizon() };
        self.turn_wheel(self.lanes.next_clock(), 1);
        for at in self.lanes.decoding()..decoding {
            if self.lanes.get(at).ready() {
                self.lanes.plan(at, 1);
                self.take_slots(at);
            }
        }
        self.lanes.plan_decode();
        Ok(horizon)
    }

    /// Gives a block to each request that needs one when it decodes at each of `steps` clocks from `clock`
    /// on, step by step and in batch order.
    pub(super) fn turn_wheel(&mut self, clock: u64, steps: u32) {
        let Self { wheel, started, kv, worst_case, .. } = self;
        wheel.turn(clock, steps, |clock, slot| {
            slot.retain(|&seat| {
                let started = &mut started[seat as usize];
                // It needs none yet where a step was planned before that went void, and none any more where
                // it ends in the step before.
                if started.need_at == clock && started.end_at > clock {
                    kv.allocate(1, &mut started.blocks);
                    started.need_at += u64::from(worst_case.block_size);
                }
                started.may_grow(*worst_case)
            });
        });
    }

    /// Allocates the blocks that the planned tokens of the request at `at` need.
    fn take_slots(&mut self, at: usize) {
        let lane = self.lanes.get(at);
        let slots = self.worst_case.slots_for(lane.projected());
        let started = &mut self.started[lane.seat as usize];
        let held = started.slots(self.worst_case.block_size);
        if slots > held {
            self.kv.allocate((slots - held).div_ceil(self.worst_case.block_size), &mut started.blocks);
        }
    }

    fn void_pending(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        for pending in self.pending.drain(..) {
            self.spare.push(pending.step);
        }
        self.lanes.void();
    }

    fn forget_delivered(&mut self) {
        for row in self.delivered.drain(..) {
            let request = self.requests.remove(row);
            self.vacant.extend(request.and_then(|request| request.seat));
        }
    }

    /// An empty step with the next number and the ends that it is to deliver. Uses the memory of a step
    /// that nobody holds any more.
    fn fresh_step(&mut self) -> Arc<Step> {
        let unheld = self.spare.iter().position(|step| Arc::strong_count(step) == 1);
        let mut step = unheld.map(|at| self.spare.swap_remove(at)).unwrap_or_default();
        // Steps that somebody keeps are theirs from now on.
        self.spare.truncate(SPARE_MAX);
        let fresh = Arc::get_mut(&mut step).expect("nobody holds it");
        fresh.clear();
        fresh.id = self.next_step;
        self.next_step += 1;
        let carried: usize = self.pending.iter().map(|pending| pending.step.finished.len()).sum();
        fresh.finished.extend_from_slice(&self.ended[carried..]);
        step
    }
}
