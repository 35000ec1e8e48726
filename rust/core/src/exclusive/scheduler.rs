//! The scheduler: its state, and how a request enters and leaves it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::blocks_due::Wheel;
use super::completion::{Completion, Finish};
use super::request::{NewRequest, Place, Request, Started};
use super::running::{Lane, Lanes};

use crate::config::{Buckets, Config};
use crate::decide::{Candidate, Chunker, Decision, Kind, Ledger, Phase, Step, Wait, WorstCase};
use crate::error::Error;
use crate::kv::KvCache;
use crate::queue::Queue;
use crate::request::{Row, Rows, outputs_max};

/// A planned step that was not completed.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) step: Arc<Step>,
    pub(super) decision: Decision,
    /// Whether requests ended since: rows of the step may then be of no more concern.
    pub(super) disturbed: bool,
    /// The head that was left waiting, and why.
    pub(super) left: Option<(Row, Wait)>,
    /// Decode steps certain to be equal, this one included.
    pub(super) horizon: u32,
    /// Position of its first row among the running requests, where its rows follow each other without a gap.
    pub(super) first: Option<usize>,
}

/// The scheduler.
#[derive(Clone, Debug)]
pub struct ExclusiveScheduler {
    pub(super) worst_case: WorstCase,
    pub(super) prefills_max: u32,
    pub(super) token_buckets: Buckets,
    pub(super) seqs_buckets: Buckets,
    pub(super) ledger: Ledger,
    pub(super) phase: Phase,
    pub(super) chunker: Chunker,
    pub(super) kv: KvCache,
    pub(super) queue: Queue,
    pub(super) requests: Rows<Request>,
    /// By seat.
    pub(super) started: Vec<Started>,
    /// Seats that are free.
    pub(super) vacant: Vec<u32>,
    /// Running requests in order of admission.
    pub(super) lanes: Lanes,
    pub(super) wheel: Wheel,
    /// Planned steps, the one that is due first; at most two.
    pub(super) pending: VecDeque<Pending>,
    /// Ended requests whose end no completed step has carried, in order.
    pub(super) ended: Vec<Row>,
    /// Requests whose end was delivered; kept until the next planning, so that the step that has just
    /// been completed stays readable.
    pub(super) delivered: Vec<Row>,
    pub(super) state: Kind,
    pub(super) next_step: u64,
    /// Steps and a completion that nobody may hold any more, to be filled again.
    pub(super) spare: Vec<Arc<Step>>,
    pub(super) completion: Option<Arc<Completion>>,
    /// Room for who ends in a step: positions among the running, and what was there.
    pub(super) places: Vec<usize>,
    pub(super) gone: Vec<Lane>,
}

impl ExclusiveScheduler {
    /// A scheduler without requests.
    pub fn new(config: &Config) -> Self {
        Self {
            worst_case: WorstCase {
                rule: config.kv_admission,
                block_size: config.block_size,
                max_model_len: config.max_model_len,
                lookahead: config.lookahead,
            },
            prefills_max: config.max_prefills_per_batch,
            token_buckets: config.num_batched_tokens_buckets.clone(),
            seqs_buckets: config.num_seqs_buckets.clone(),
            ledger: Ledger::new(config.max_num_seqs, config.num_blocks),
            phase: Phase::new(config),
            chunker: Chunker::new(config),
            kv: KvCache::new(config.num_blocks, config.block_size, config.prefix_caching),
            queue: Queue::new(config.policy),
            requests: Rows::default(),
            started: Vec::new(),
            vacant: Vec::new(),
            lanes: Lanes::new(),
            wheel: Wheel::new(config.block_size),
            pending: VecDeque::with_capacity(2),
            ended: Vec::new(),
            delivered: Vec::new(),
            state: Kind::Idle,
            next_step: 0,
            spare: Vec::new(),
            completion: None,
            places: Vec::new(),
            gone: Vec::new(),
        }
    }

    /// Queues a request. Refused are a prompt longer than the model takes and a worst case larger than
    /// the whole cache, since neither could ever run.
    pub fn add(&mut self, request: NewRequest) -> Result<Row, Error> {
        let NewRequest { prompt, max_tokens, priority, stop_token_ids, sampling } = request;
        prompt.check()?;
        let (length, max_model_len) = (prompt.len() as u64, self.worst_case.max_model_len);
        if length > max_model_len.into() {
            return Err(Error::PromptTooLong { prompt: length, max_model_len: max_model_len.into() });
        }
        if max_tokens == 0 {
            return Err(Error::invalid("max_tokens", max_tokens, "a whole number from 1"));
        }
        let length = u32::try_from(length).expect("at most max_model_len");
        let outputs_max = outputs_max(length, max_tokens, max_model_len);
        let need = self.worst_case.blocks(length, outputs_max);
        self.ledger.fits_ever(need)?;
        let place = Place::Running;
        let seat = None;
        let request = Request { prompt, priority, stop_token_ids, sampling, outputs_max, need, place, seat };
        let row = self.requests.insert(request);
        let ticket = self.queue.push(row, priority);
        self.doubt_horizon();
        self.request_mut(row).place = Place::Waiting(ticket);
        Ok(row)
    }

    /// Ends a request at once, wherever it stands; `false` when it is not alive.
    pub fn cancel(&mut self, row: Row) -> bool {
        let Some(request) = self.requests.get_mut(row) else { return false };
        match std::mem::replace(&mut request.place, Place::Ended(None)) {
            Place::Waiting(ticket) => {
                let removed = self.queue.remove(request.priority, ticket);
                assert!(removed, "a waiting request is in the queue");
            }
            Place::Running => {
                let at = self.lane_of(row).expect("a running request has a lane");
                let lane = self.lanes.get(at);
                self.lanes.remove(&[at], &mut Vec::new());
                self.leave(&lane, None);
            }
            ended @ Place::Ended(_) => {
                request.place = ended;
                return false;
            }
        }
        self.ended.push(row);
        self.doubt_horizon();
        true
    }

    /// Requests whose end the last completed step delivered.
    pub fn delivered(&self) -> &[Row] {
        &self.delivered
    }

    /// Idle when nothing waits and nothing runs, else what the last completed step did.
    pub fn state(&self) -> Kind {
        self.state
    }

    /// Requests in the queue.
    pub fn num_waiting(&self) -> usize {
        self.queue.len()
    }

    /// Requests that hold a slot.
    pub fn num_running(&self) -> usize {
        self.lanes.len()
    }

    /// KV blocks that nobody holds, those with a content that may be shared included.
    pub fn free_blocks(&self) -> u32 {
        self.kv.pool().free()
    }

    /// KV blocks promised to running requests.
    pub fn reserved_blocks(&self) -> u32 {
        self.ledger.reserved()
    }

    /// Bytes held for the table of requests and the queue; token ids that were given are not counted.
    pub fn heap_bytes(&self) -> usize {
        self.requests.heap_bytes() + self.queue.heap_bytes()
    }

    pub(super) fn request(&self, row: Row) -> &Request {
        self.requests.get(row).expect("a row in a queue or a lane is alive")
    }

    pub(super) fn request_mut(&mut self, row: Row) -> &mut Request {
        self.requests.get_mut(row).expect("a row in a queue or a lane is alive")
    }

    pub(super) fn lane_of(&self, row: Row) -> Option<usize> {
        self.lanes.rows().iter().position(|&other| other == row)
    }

    /// Whether a prompt is part done once the planned steps have run. Prompts that are part done are the
    /// newest of the running requests: nobody starts beside them.
    pub(super) fn prefill_in_progress(&self) -> bool {
        self.lanes.last_prefilling()
    }

    /// The choice of `phase` once the planned steps have run.
    pub(super) fn decide(&self, phase: &Phase, throttle_prefills: bool) -> Decision {
        let prefill_wanted =
            self.prefill_in_progress() || self.refused_head().is_some_and(|(_, refused)| refused.is_none());
        let decode_ready = self.lanes.iter().any(|lane| lane.ready());
        phase.decide(crate::decide::PhaseInputs { prefill_wanted, decode_ready, throttle_prefills })
    }

    /// The head of the queue, and admission's word on it.
    pub(super) fn refused_head(&self) -> Option<(Row, Option<Wait>)> {
        let row = self.queue.head()?;
        let need = self.request(row).need;
        let prefill_in_progress = self.prefill_in_progress();
        Some((row, self.ledger.refuse(&Candidate { need, prefill_in_progress, ..Candidate::default() })))
    }

    /// What was certain of the steps after the pending one no longer is.
    pub(super) fn doubt_horizon(&mut self) {
        for pending in &mut self.pending {
            pending.horizon = 1;
        }
    }

    /// Frees what the request of `lane`, already out of the table, holds.
    pub(super) fn leave(&mut self, lane: &Lane, finish: Option<Finish>) {
        self.ledger.release(lane.row);
        let request = self.requests.get_mut(lane.row).expect("a running request is alive");
        request.place = Place::Ended(finish);
        let started = &mut self.started[lane.seat as usize];
        started.computed = lane.computed;
        if lane.decoding && started.may_grow(self.worst_case) {
            self.wheel.remove(started.need_at, lane.seat);
        }
        self.kv.release(&started.blocks);
        for pending in &mut self.pending {
            pending.first = None;
            pending.disturbed = true;
        }
    }
}
