//! The state of the exclusive scheduler, and how requests are added, cancelled and released.

use std::collections::VecDeque;
use std::sync::Arc;

use super::blocks_due::BlocksDue;
use super::completion::{Completion, Finish};
use super::request::{NewRequest, Request, RequestState, RunningRequest, Started};
use super::running::RunningRequests;
use crate::config::{Buckets, Config};
use crate::decide::{Candidate, Chunker, Decision, Kind, Ledger, Phase, Step, Wait, WorstCase};
use crate::error::Error;
use crate::kv::KvCache;
use crate::queue::Queue;
use crate::request::{Row, Slab, outputs_max};

/// A step in flight: planned and not yet completed.
#[derive(Clone, Debug)]
pub(super) struct InFlight {
    pub(super) step: Arc<Step>,
    pub(super) decision: Decision,
    /// Whether a running request ended since the step was planned. Rows of the step may then have no live request.
    pub(super) any_ended: bool,
    /// The head that was not admitted when the step was planned, and the reason.
    pub(super) head_wait: Option<(Row, Wait)>,
    /// Number of identical decode steps guaranteed to follow, this one included.
    pub(super) horizon: u32,
    /// Position of the step's first row among the running requests, if the step's rows are contiguous there.
    pub(super) first: Option<usize>,
}

/// Scheduler with steps that are all prefill or all decode.
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
    pub(super) requests: Slab<Request>,
    /// The requests that were started, by batch slot.
    pub(super) started: Vec<Started>,
    /// Batch slots that no request uses.
    pub(super) free_slots: Vec<u32>,
    pub(super) running: RunningRequests,
    pub(super) blocks_due: BlocksDue,
    /// At most two steps, the one that is due first.
    pub(super) in_flight: VecDeque<InFlight>,
    /// Requests that ended and that no completed step has reported, in order.
    pub(super) ended: Vec<Row>,
    /// Requests that the last completed step reported as ended. They are removed when the next step is planned, so that
    /// the last step stays readable.
    pub(super) reported: Vec<Row>,
    pub(super) state: Kind,
    pub(super) next_step: u64,
    /// Steps and a completion to reuse once no caller holds them.
    pub(super) spare: Vec<Arc<Step>>,
    pub(super) completion: Option<Arc<Completion>>,
    /// Buffers for the requests that end in a step: positions among the running requests, and their last values.
    pub(super) positions: Vec<usize>,
    pub(super) removed: Vec<RunningRequest>,
}

impl ExclusiveScheduler {
    /// Return a scheduler without requests.
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
            requests: Slab::default(),
            started: Vec::new(),
            free_slots: Vec::new(),
            running: RunningRequests::new(),
            blocks_due: BlocksDue::new(config.block_size),
            in_flight: VecDeque::with_capacity(2),
            ended: Vec::new(),
            reported: Vec::new(),
            state: Kind::Idle,
            next_step: 0,
            spare: Vec::new(),
            completion: None,
            positions: Vec::new(),
            removed: Vec::new(),
        }
    }

    /// Add a request to the queue.
    ///
    /// Returns [`Error::Invalid`] for a bad value, [`Error::PromptTooLong`] for a prompt longer than `max_model_len`,
    /// and [`Error::NeverFits`] for a worst case larger than the whole KV cache.
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
        let needed_blocks = self.worst_case.blocks(length, outputs_max);
        self.ledger.fits_ever(needed_blocks)?;
        // The ticket of the state `Waiting` is known only once the request has a row.
        let state = RequestState::Running;
        let slot = None;
        let request = Request { prompt, priority, stop_token_ids, sampling, outputs_max, needed_blocks, state, slot };
        let row = self.requests.insert(request);
        let ticket = self.queue.push(row, priority);
        self.invalidate_horizon();
        self.request_mut(row).state = RequestState::Waiting(ticket);
        Ok(row)
    }

    /// Cancel a waiting or running request at once. Returns `false` if the request has ended already.
    pub fn cancel(&mut self, row: Row) -> bool {
        let Some(request) = self.requests.get_mut(row) else { return false };
        match std::mem::replace(&mut request.state, RequestState::Ended(None)) {
            RequestState::Waiting(ticket) => {
                let removed = self.queue.remove(request.priority, ticket);
                assert!(removed, "a waiting request is in the queue");
            }
            RequestState::Running => {
                let at = self.running_position(row).expect("a running request has a position");
                let entry = self.running.get(at);
                self.running.remove(&[at], &mut Vec::new());
                self.release(&entry, None);
            }
            ended @ RequestState::Ended(_) => {
                request.state = ended;
                return false;
            }
        }
        self.ended.push(row);
        self.invalidate_horizon();
        true
    }

    /// Requests that the last completed step reported as ended.
    pub fn reported(&self) -> &[Row] {
        &self.reported
    }

    /// Kind of the last completed step; [`Kind::Idle`] if no request was waiting or running after it.
    pub fn state(&self) -> Kind {
        self.state
    }

    /// Number of waiting requests.
    pub fn num_waiting(&self) -> usize {
        self.queue.len()
    }

    /// Number of running requests.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Number of KV blocks that no request references, cached blocks included.
    pub fn free_blocks(&self) -> u32 {
        self.kv.pool().num_free()
    }

    /// Number of KV blocks reserved by running requests.
    pub fn reserved_blocks(&self) -> u32 {
        self.ledger.reserved()
    }

    /// Bytes of heap memory of the request table and the queue, without the token ids of the prompts.
    pub fn heap_bytes(&self) -> usize {
        self.requests.heap_bytes() + self.queue.heap_bytes()
    }

    pub(super) fn request(&self, row: Row) -> &Request {
        self.requests.get(row).expect("a waiting or running request is alive")
    }

    pub(super) fn request_mut(&mut self, row: Row) -> &mut Request {
        self.requests.get_mut(row).expect("a waiting or running request is alive")
    }

    pub(super) fn running_position(&self, row: Row) -> Option<usize> {
        self.running.rows().iter().position(|&other| other == row)
    }

    /// Whether a running request has prompt tokens left once the planned steps have run. Only the newest request needs
    /// a look, because no request is admitted while a prompt is prefilling.
    pub(super) fn prefill_in_progress(&self) -> bool {
        self.running.newest_prefilling()
    }

    /// Return the decision of `phase` once the planned steps have run.
    pub(super) fn decide(&self, phase: &Phase, throttle_prefills: bool) -> Decision {
        let prefill_wanted =
            self.prefill_in_progress() || self.refused_head().is_some_and(|(_, refused)| refused.is_none());
        let decode_ready = self.running.iter().any(|request| request.ready());
        phase.decide(crate::decide::PhaseInputs { prefill_wanted, decode_ready, throttle_prefills })
    }

    /// Return the head of the queue, and the reason if admission refuses it.
    pub(super) fn refused_head(&self) -> Option<(Row, Option<Wait>)> {
        let row = self.queue.head()?;
        let needed_blocks = self.request(row).needed_blocks;
        let prefill_in_progress = self.prefill_in_progress();
        Some((row, self.ledger.refuse(&Candidate { needed_blocks, prefill_in_progress, ..Candidate::default() })))
    }

    /// Mark the precomputed run of identical decode steps as no longer valid.
    pub(super) fn invalidate_horizon(&mut self) {
        for in_flight in &mut self.in_flight {
            in_flight.horizon = 1;
        }
    }

    /// Release the reservation, the batch slot and the KV blocks of a request that was removed from the running
    /// requests.
    pub(super) fn release(&mut self, entry: &RunningRequest, finish: Option<Finish>) {
        self.ledger.release(entry.row);
        let request = self.requests.get_mut(entry.row).expect("a running request is alive");
        request.state = RequestState::Ended(finish);
        let started = &mut self.started[entry.slot as usize];
        started.computed = entry.computed;
        if entry.decoding && started.may_grow(self.worst_case) {
            self.blocks_due.remove(started.next_block_at, entry.slot);
        }
        self.kv.release(&started.blocks);
        for in_flight in &mut self.in_flight {
            in_flight.first = None;
            in_flight.any_ended = true;
        }
    }
}
