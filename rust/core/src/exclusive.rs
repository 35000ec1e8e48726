//! The exclusive scheduler: each step is all prefill or all decode, padded to a compiled size.
//!
//! It composes the decision objects ([`Ledger`], [`Phase`], [`Chunker`], [`Buckets`]) over a queue and a
//! KV cache of its own. Planning admits and allocates at once; counts move when a step is completed, so a
//! step that was not completed may be planned again. One step may be planned ahead of a pending one, on
//! the counts that the pending one will leave behind.
//!
//! Cost: a decode step moves one clock for all that decode, and looks at those that end or need a block; it
//! never looks at who waits. What a request needs only when it starts or ends stays out of its columns.

mod check;
mod complete;
mod lane;
mod plan;
mod wheel;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::bucket::Buckets;
use crate::chunk::Chunker;
use crate::config::{Config, TOKENS_MAX};
use crate::error::Error;
use crate::kv_cache::KvCache;
use crate::ledger::{Candidate, Ledger, Wait, WorstCase};
use crate::phase::{Decision, Kind, Phase};
use crate::prefix::Content;
use crate::queue::{Queue, Ticket};
use crate::request::{Prompt, Row, Rows, SEGMENT_ID_MAX, SEGMENT_TOKENS};
use crate::step::Step;

pub use complete::{Completion, Finish, Outcome, Tokens};
pub use plan::Options;

use lane::{Lane, Lanes};
use wheel::Wheel;

/// A request to add.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Its prompt.
    pub prompt: Prompt,
    /// Most tokens that it may emit; capped at `max(1, max_model_len - prompt)`.
    pub max_tokens: u32,
    /// Under the priority policy the lower number goes first.
    pub priority: i64,
    /// Tokens that end it.
    pub stop_token_ids: Box<[u32]>,
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Waiting(Ticket),
    Running,
    /// Finished, or cancelled where there is no reason.
    Ended(Option<Finish>),
}

#[derive(Clone, Debug)]
struct Request {
    prompt: Prompt,
    priority: i64,
    stop_token_ids: Box<[u32]>,
    /// Outputs, capped.
    outputs_max: u32,
    /// Blocks reserved while it runs.
    need: u32,
    place: Place,
    /// Where its [`Run`] is, once it was started.
    run: Option<u32>,
}

/// What only a request that was started has. Its place is used again, and with it the memory.
#[derive(Clone, Debug, Default)]
struct Run {
    blocks: Vec<u32>,
    outputs: Vec<u32>,
    /// Leading blocks whose content is offered to others, and the content of the last of them.
    offered: u32,
    content: Content,
    /// Tokens computed when it ended.
    computed: u32,
    /// While it decodes: the clock at which it needs its next block.
    need_at: u64,
    /// While it decodes: the clock at which it ends.
    end_at: u64,
}

impl Run {
    /// KV slots of its blocks.
    fn slots(&self, block_size: u32) -> u32 {
        u32::try_from(self.blocks.len()).expect("blocks are counted in 32 bits") * block_size
    }
}

/// Status of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// In the queue.
    Waiting,
    /// Its prompt is not done.
    Prefill,
    /// It emits tokens.
    Decode,
    /// It ended by itself.
    Finished(Finish),
    /// It was cancelled.
    Cancelled,
}

impl Status {
    /// Whether it has not ended.
    pub fn is_live(self) -> bool {
        matches!(self, Self::Waiting | Self::Prefill | Self::Decode)
    }
}

/// A look at one request.
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'a> {
    /// Its status, as of the last completed step.
    pub status: Status,
    /// Tokens computed, as of the last completed step.
    pub computed: u32,
    /// Tokens emitted.
    pub generated: u32,
    /// Their ids as far as they were told, [`crate::request::UNKNOWN_TOKEN`] in between.
    pub outputs: &'a [u32],
    /// The KV blocks that it holds.
    pub blocks: &'a [u32],
    /// Its prompt.
    pub prompt: &'a Prompt,
}

/// Why the head of the queue waits, and the numbers behind it, in KV blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The head.
    pub row: Row,
    /// Why.
    pub wait: Wait,
    /// What it needs at worst.
    pub needed: u32,
    /// What running requests have reserved.
    pub reserved: u32,
    /// The whole cache.
    pub usable: u32,
}

/// A planned step that was not completed.
#[derive(Clone, Debug)]
struct Pending {
    step: Arc<Step>,
    decision: Decision,
    /// Rows of the step whose request ended since.
    dropped: Vec<Row>,
    /// The head that was left waiting, and why.
    left: Option<(Row, Wait)>,
    /// Decode steps certain to be equal, this one included.
    horizon: u32,
    /// Position of its first row among the running requests, where its rows follow each other without a gap.
    first: Option<usize>,
}

/// The scheduler.
#[derive(Clone, Debug)]
pub struct ExclusiveScheduler {
    worst_case: WorstCase,
    prefills_max: u32,
    token_buckets: Buckets,
    seqs_buckets: Buckets,
    ledger: Ledger,
    phase: Phase,
    chunker: Chunker,
    kv: KvCache,
    queue: Queue,
    requests: Rows<Request>,
    runs: Vec<Run>,
    /// Places in `runs` that are free.
    vacant: Vec<u32>,
    /// Running requests in order of admission.
    lanes: Lanes,
    wheel: Wheel,
    /// Planned steps, the one that is due first; at most two.
    pending: VecDeque<Pending>,
    /// Ended requests whose end no completed step has carried, in order.
    ended: Vec<Row>,
    /// Requests whose end was delivered; kept until the next planning, so that the step that has just
    /// been completed stays readable.
    delivered: Vec<Row>,
    state: Kind,
    next_step: u64,
    /// Steps and a completion that nobody may hold any more, to be filled again.
    spare: Vec<Arc<Step>>,
    completion: Option<Arc<Completion>>,
    /// Room for who ends in a step: positions among the running, and what was there.
    places: Vec<usize>,
    gone: Vec<Lane>,
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
            runs: Vec::new(),
            vacant: Vec::new(),
            lanes: Lanes::default(),
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
        let NewRequest { prompt, max_tokens, priority, stop_token_ids } = request;
        let length = prompt.len() as u64;
        if length == 0 {
            return Err(Error::invalid("prompt", "no tokens", "at least one token"));
        }
        let max_model_len = self.worst_case.max_model_len;
        if length > max_model_len.into() {
            return Err(Error::PromptTooLong { prompt: length, max_model_len: max_model_len.into() });
        }
        if max_tokens == 0 {
            return Err(Error::invalid("max_tokens", max_tokens, "a whole number from 1"));
        }
        if let Prompt::Tokens(ids) = &prompt
            && let Some(id) = ids.iter().find(|&&id| id > TOKENS_MAX)
        {
            return Err(Error::invalid("prompt", id, format!("token ids from 0 to {TOKENS_MAX}")));
        }
        if let Prompt::Segments { ids, length } = &prompt
            && ids.len() < length.div_ceil(SEGMENT_TOKENS) as usize
        {
            let expected = format!("one id for each {SEGMENT_TOKENS} of {length} prompt tokens");
            return Err(Error::invalid("hash_ids", format!("{} ids", ids.len()), expected));
        }
        if let Prompt::Segments { ids, .. } = &prompt
            && let Some(id) = ids.iter().find(|&&id| id > SEGMENT_ID_MAX)
        {
            return Err(Error::invalid("hash_ids", id, format!("ids from 0 to {SEGMENT_ID_MAX}")));
        }
        let length = u32::try_from(length).expect("at most max_model_len");
        let outputs_max = max_tokens.min((max_model_len - length).max(1));
        let need = self.worst_case.blocks(length, outputs_max);
        self.ledger.fits_ever(need)?;
        let place = Place::Running;
        let row =
            self.requests.insert(Request { prompt, priority, stop_token_ids, outputs_max, need, place, run: None });
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

    /// Why the head waits, as of now; `None` when nothing waits.
    pub fn explain(&self) -> Option<Explanation> {
        let row = self.queue.head()?;
        let needed = self.request(row).need;
        let candidate =
            Candidate { need: needed, prefill_in_progress: self.prefill_in_progress(), ..Candidate::default() };
        // What was found when the pending step was planned holds while somebody is left in that step.
        let held = |pending: &&Pending| pending.dropped.len() < pending.step.rows.len();
        let left = self.pending.back().filter(held).and_then(|pending| pending.left).filter(|&(head, _)| head == row);
        let refused = match (self.ledger.refuse(&candidate), left) {
            // Tested before the cache; true while the step that left no room is pending.
            (None | Some(Wait::Kv), Some((_, wait @ (Wait::PrefillInProgress | Wait::PrefillBatchFull)))) => Some(wait),
            (refused, _) => refused,
        };
        let held_back = || match left {
            Some((_, wait @ (Wait::Interleave | Wait::Throttled))) => wait,
            _ if !self.pending.is_empty() => Wait::StepRunning,
            _ if self.decide(&self.phase, false).interleaved => Wait::Interleave,
            _ => Wait::Ready,
        };
        let (reserved, usable) = (self.ledger.reserved(), self.ledger.usable());
        Some(Explanation { row, wait: refused.unwrap_or_else(held_back), needed, reserved, usable })
    }

    /// A look at a request; `None` once its end was delivered and the next step planned.
    pub fn view(&self, row: Row) -> Option<RequestView<'_>> {
        let request = self.requests.get(row)?;
        let run = request.run.map(|run| &self.runs[run as usize]);
        let (computed, prompt) = match self.lane_of(row) {
            Some(at) => (self.lanes.get(at).computed, self.lanes.get(at).prompt),
            None => (run.map_or(0, |run| run.computed), Lane::length(&request.prompt)),
        };
        let status = match request.place {
            Place::Waiting(_) => Status::Waiting,
            Place::Running if computed < prompt => Status::Prefill,
            Place::Running => Status::Decode,
            Place::Ended(Some(finish)) => Status::Finished(finish),
            Place::Ended(None) => Status::Cancelled,
        };
        let blocks = run.filter(|_| request.place == Place::Running).map_or(&[][..], |run| &run.blocks);
        let outputs = run.map_or(&[][..], |run| &run.outputs);
        let generated = Lane::generated(computed, prompt);
        Some(RequestView { status, computed, generated, outputs, blocks, prompt: &request.prompt })
    }

    /// The KV blocks of the row at `at` of `step` as they were when it was planned; `None` when the step
    /// is too old to tell.
    pub fn step_blocks(&self, step: &Step, at: usize) -> Option<&[u32]> {
        let run = &self.runs[self.requests.get(step.rows[at])?.run? as usize];
        let held = self.worst_case.blocks_for(step.computed(at) + step.tokens(at));
        run.blocks.get(..held as usize)
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

    fn request(&self, row: Row) -> &Request {
        self.requests.get(row).expect("a row in a queue or a lane is alive")
    }

    fn request_mut(&mut self, row: Row) -> &mut Request {
        self.requests.get_mut(row).expect("a row in a queue or a lane is alive")
    }

    fn lane_of(&self, row: Row) -> Option<usize> {
        self.lanes.rows().iter().position(|&other| other == row)
    }

    /// Whether a prompt is part done once the planned steps have run. Prompts that are part done are the
    /// newest of the running requests: nobody starts beside them.
    fn prefill_in_progress(&self) -> bool {
        self.lanes.last_prefilling()
    }

    /// The choice of `phase` once the planned steps have run.
    fn decide(&self, phase: &Phase, throttle_prefills: bool) -> Decision {
        let prefill_wanted =
            self.prefill_in_progress() || self.refused_head().is_some_and(|(_, refused)| refused.is_none());
        let decode_ready = self.lanes.iter().any(|lane| lane.ready());
        phase.decide(crate::phase::Inputs { prefill_wanted, decode_ready, throttle_prefills })
    }

    /// The head of the queue, and admission's word on it.
    fn refused_head(&self) -> Option<(Row, Option<Wait>)> {
        let row = self.queue.head()?;
        let need = self.request(row).need;
        let prefill_in_progress = self.prefill_in_progress();
        Some((row, self.ledger.refuse(&Candidate { need, prefill_in_progress, ..Candidate::default() })))
    }

    /// What was certain of the steps after the pending one no longer is.
    fn doubt_horizon(&mut self) {
        for pending in &mut self.pending {
            pending.horizon = 1;
        }
    }

    /// Frees what the request of `lane`, already out of the table, holds.
    fn leave(&mut self, lane: &Lane, finish: Option<Finish>) {
        self.ledger.release(lane.row);
        let request = self.requests.get_mut(lane.row).expect("a running request is alive");
        request.place = Place::Ended(finish);
        let run = &mut self.runs[lane.run as usize];
        run.computed = lane.computed;
        if lane.decoding && run.slots(self.worst_case.block_size) < self.worst_case.max_model_len {
            self.wheel.remove(run.need_at, lane.run);
        }
        self.kv.release(&run.blocks);
        for pending in &mut self.pending {
            pending.first = None;
            if pending.step.rows.contains(&lane.row) {
                pending.dropped.push(lane.row);
            }
        }
    }
}
