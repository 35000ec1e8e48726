//! Planning: `schedule`.

use std::sync::Arc;

use super::lane::Lane;
use super::{ExclusiveScheduler, Pending, Place, Request, Run};
use crate::error::Error;
use crate::kv_cache::KvCache;
use crate::ledger::{Candidate, Wait, WorstCase};
use crate::phase::{Decision, Kind};
use crate::request::{Prompt, Row, Rows};
use crate::step::{Chunk, Step, check};

/// Steps kept for their memory: the last completed one may still be held, and so may one that went void.
const SPARE_MAX: usize = 4;

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
    pub fn schedule(&mut self, options: Options) -> Result<Arc<Step>, Error> {
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
        let mut horizon = 1;
        let left = match decision.kind {
            Kind::Idle => self.head_left(decision),
            Kind::Prefill => self.plan_prefill(planned)?,
            Kind::Decode => {
                horizon = self.plan_decode(planned)?;
                self.head_left(decision)
            }
        };
        // A head that may start, or a prompt part done, ends the run of equal decode steps.
        let undisturbed = !self.prefill_in_progress() && matches!(left, None | Some(Wait::Slots | Wait::Kv));
        let certain = undisturbed && self.pending.is_empty();
        let horizon = if certain { horizon } else { 1 };
        self.doubt_horizon();
        let left = self.queue.head().zip(left);
        self.pending.push_back(Pending { step: Arc::clone(&step), decision, dropped: Vec::new(), left, horizon });
        debug_assert_eq!(self.check(), Ok(()));
        Ok(step)
    }

    /// Why the head waits although a step without prefill is taken.
    fn head_left(&self, decision: Decision) -> Option<Wait> {
        let (_, refused) = self.refused_head()?;
        Some(refused.unwrap_or(if decision.interleaved { Wait::Interleave } else { Wait::Throttled }))
    }

    /// Fills `step` with prompt tokens; answers why the next head is not among them.
    fn plan_prefill(&mut self, step: &mut Step) -> Result<Option<Wait>, Error> {
        let (first, left) = if self.prefill_in_progress() {
            let first = self.lanes.iter().rposition(|lane| !lane.prefilling()).map_or(0, |at| at + 1);
            (first, self.queue.head().map(|_| Wait::PrefillInProgress))
        } else {
            let first = self.lanes.len();
            (first, self.start_prompts())
        };
        let others = self.lanes.len() + self.queue.len() > 1;
        let mut rests = 0;
        let fit = |lane: &&Lane| {
            rests += u64::from(lane.rest());
            self.chunker.packs(rests, others)
        };
        let together = self.lanes[first..].iter().take(self.prefills_max as usize).take_while(fit).count();
        for at in first..first + together.max(1) {
            let lane = &self.lanes[at];
            let (rest, uncomputed) = (lane.rest(), lane.prompt - lane.projected());
            let tokens = if together > 1 { uncomputed } else { self.chunker.chunk(rest, others).min(uncomputed) };
            step.rows.push(lane.row);
            step.computed.push(lane.projected());
            step.chunks.push(Chunk { tokens, last: tokens == uncomputed });
        }
        step.kind = Kind::Prefill;
        step.padded = self.token_buckets.fit(step.total())?;
        let lanes = &self.lanes[first..];
        let rows = step.chunks.iter().zip(lanes).map(|(chunk, lane)| (lane.prefilling(), i64::from(chunk.tokens)));
        check(step.kind, step.padded, rows, |at| step.rows[at].index())?;
        for (chunk, lane) in step.chunks.iter().zip(&mut self.lanes[first..]) {
            take_slots(lane, chunk.tokens, self.worst_case, &mut self.requests, &mut self.kv);
        }
        Ok(left)
    }

    /// Admits heads of the queue, as many as may start together; answers why the next one may not.
    fn start_prompts(&mut self) -> Option<Wait> {
        let first = self.lanes.len();
        let mut prompts = 0;
        while let Some(row) = self.queue.head() {
            let request = self.request(row);
            prompts += request.prompt.len() as u64;
            let started = self.lanes.len() - first;
            let others = self.lanes.len() + self.queue.len() > 1;
            let full = started >= self.prefills_max as usize || !self.chunker.packs(prompts, others);
            let candidate = Candidate { need: request.need, batch_full: started > 0 && full, ..Candidate::default() };
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
        let mut blocks = Vec::with_capacity(request.need as usize);
        let content = self.kv.share(&request.sequence(), prompt - 1, &mut blocks);
        let offered = u32::try_from(blocks.len()).expect("blocks are counted in 32 bits");
        let capacity = offered * self.worst_case.block_size;
        // Room for all outputs now, so that decoding never allocates.
        let outputs = Vec::with_capacity(if told { request.outputs_max as usize } else { 0 });
        let end = prompt + request.outputs_max - 1;
        request.run = Some(Box::new(Run { blocks, outputs, offered, content, computed: 0 }));
        self.lanes.push(Lane { row, prompt, end, hit: capacity, computed: capacity, planned: 0, capacity, told });
    }

    /// Fills `step` with one token of each request that is ready; answers how many steps in a row the
    /// same requests can decode.
    fn plan_decode(&mut self, step: &mut Step) -> Result<u32, Error> {
        let ready = || self.lanes.iter().filter(|lane| lane.ready());
        step.kind = Kind::Decode;
        let count = u32::try_from(ready().count()).expect("at most max_num_seqs");
        step.padded = self.seqs_buckets.fit(count)?;
        let rows = ready().map(|lane| (lane.prefilling(), 1));
        check(step.kind, step.padded, rows, |at| ready().nth(at).map_or(0, |lane| lane.row.index()))?;
        step.rows.reserve(count as usize);
        step.computed.reserve(count as usize);
        let mut horizon = u32::MAX;
        let Self { lanes, requests, kv, worst_case, .. } = self;
        for lane in lanes.iter_mut().filter(|lane| lane.ready()) {
            let projected = lane.projected();
            step.rows.push(lane.row);
            step.computed.push(projected);
            horizon = horizon.min(lane.end - projected);
            if lane.capacity > projected + worst_case.lookahead {
                lane.planned += 1;
            } else {
                take_slots(lane, 1, *worst_case, requests, kv);
            }
        }
        Ok(horizon)
    }

    fn void_pending(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        for pending in self.pending.drain(..) {
            self.spare.push(pending.step);
        }
        for lane in &mut self.lanes {
            lane.planned = 0;
        }
    }

    fn forget_delivered(&mut self) {
        for row in self.delivered.drain(..) {
            self.requests.remove(row);
        }
    }

    /// An empty step with the next number and the ends that it is to deliver. Uses the memory of a step
    /// that nobody holds any more.
    fn fresh_step(&mut self) -> Arc<Step> {
        let unheld = self.spare.iter_mut().position(|step| Arc::get_mut(step).is_some());
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

/// Plans `tokens` more of a running request and allocates the blocks that they need.
pub(super) fn take_slots(
    lane: &mut Lane,
    tokens: u32,
    worst_case: WorstCase,
    requests: &mut Rows<Request>,
    kv: &mut KvCache,
) {
    lane.planned += tokens;
    let capacity = worst_case.blocks_for(lane.projected()) * worst_case.block_size;
    if lane.capacity < capacity {
        let run = requests.get_mut(lane.row).and_then(|request| request.run.as_deref_mut());
        let blocks = &mut run.expect("a running request was started").blocks;
        while lane.capacity < capacity {
            blocks.push(kv.allocate());
            lane.capacity += worst_case.block_size;
        }
    }
}
