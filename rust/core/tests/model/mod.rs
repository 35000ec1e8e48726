//! The reference model of the exclusive scheduler: lists and loops. Every derived value is computed when it is needed.
//! A request is named by its number in order of arrival.

pub(crate) mod cases;
mod chunks;
mod pool;
mod request;

use neuron_sched_core::config::{Chunking, Config, KvAdmission};
use neuron_sched_core::decide::{Kind, Wait};
use neuron_sched_core::exclusive::Finish;
use neuron_sched_core::queue::Policy;
use neuron_sched_core::request::Prompt;

use pool::Pool;
pub(crate) use request::{Request, Status};

/// Return the smallest of `sizes` that is at least `count`.
pub(crate) fn fit(sizes: &[u32], count: u32) -> u32 {
    if count == 0 { 0 } else { *sizes.iter().find(|&&size| size >= count).expect("within the last bucket") }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedRow {
    pub(crate) request: usize,
    pub(crate) tokens: u32,
    pub(crate) padded: u32,
    pub(crate) computed: u32,
    pub(crate) emits: bool,
    pub(crate) blocks: Vec<u32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) kind: Kind,
    pub(crate) rows: Vec<PlannedRow>,
    pub(crate) padded_tokens: u32,
    pub(crate) finished: Vec<usize>,
    decodes_due: u32,
    decode_ready: bool,
    /// Whether both a prefill and a decode were possible.
    pub(crate) contested: bool,
    throttle: bool,
    /// The head that was not admitted, and the reason.
    head_wait: Option<(usize, Wait)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Emitted {
    pub(crate) request: usize,
    pub(crate) token: Option<u32>,
    pub(crate) finish: Option<Finish>,
}

/// Counts once the planned steps have run.
struct Projection {
    computed: Vec<u32>,
    prefill_streak: u32,
    decodes_due: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) config: Config,
    pub(crate) requests: Vec<Request>,
    waiting: Vec<usize>,
    pub(crate) running: Vec<usize>,
    ended: Vec<usize>,
    /// At most two steps, the one that is due first.
    pub(crate) in_flight: Vec<Step>,
    pub(crate) pool: Pool,
    pub(crate) state: Kind,
    prefill_streak: u32,
    decodes_due: u32,
    /// Decode steps completed in a row while a prefill was wanted and not throttled.
    decode_streak: u32,
}

impl Model {
    pub(crate) fn new(config: Config) -> Self {
        let pool = Pool::new(config.num_blocks);
        Self {
            config,
            requests: Vec::new(),
            waiting: Vec::new(),
            running: Vec::new(),
            ended: Vec::new(),
            in_flight: Vec::new(),
            pool,
            state: Kind::Idle,
            prefill_streak: 0,
            decodes_due: 0,
            decode_streak: 0,
        }
    }

    pub(crate) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    fn blocks(&self, tokens: u32) -> u32 {
        (tokens + self.config.lookahead).min(self.config.max_model_len).div_ceil(self.config.block_size)
    }

    fn needed_blocks(&self, request: usize) -> u32 {
        let request = &self.requests[request];
        match self.config.kv_admission {
            KvAdmission::Reserve => self.blocks(request.length() + request.outputs_max - 1),
            KvAdmission::MaxModelLen => self.config.max_model_len.div_ceil(self.config.block_size),
        }
    }

    pub(crate) fn reserved(&self) -> u32 {
        self.running.iter().map(|&request| self.needed_blocks(request)).sum()
    }

    /// Add a request. Returns whether it is accepted; its number is then the count of requests accepted before.
    pub(crate) fn add(&mut self, prompt: Prompt, max_tokens: u32, priority: i64, stop: Vec<u32>) -> bool {
        let length = u32::try_from(prompt.len()).unwrap();
        if length > self.config.max_model_len {
            return false;
        }
        let outputs_max = max_tokens.min((self.config.max_model_len - length).max(1));
        self.requests.push(Request {
            prompt,
            stop,
            priority: if self.config.policy == Policy::Priority { priority } else { 0 },
            outputs_max,
            status: Status::Waiting,
            hit: 0,
            computed: 0,
            outputs: Vec::new(),
            blocks: Vec::new(),
            prefill_streak: 0,
        });
        let number = self.requests.len() - 1;
        if self.needed_blocks(number) > self.config.num_blocks {
            self.requests.pop();
            return false;
        }
        self.waiting.push(number);
        self.waiting.sort_by_key(|&request| (self.requests[request].priority, request));
        true
    }

    pub(crate) fn cancel(&mut self, request: usize) -> bool {
        let alive = matches!(self.requests[request].status, Status::Waiting | Status::Running);
        if alive {
            self.end(request, Status::Cancelled);
        }
        alive
    }

    fn end(&mut self, number: usize, status: Status) {
        self.waiting.retain(|&other| other != number);
        self.running.retain(|&other| other != number);
        let request = &mut self.requests[number];
        request.status = status;
        let blocks = std::mem::take(&mut request.blocks);
        self.pool.release(&blocks);
        self.ended.push(number);
    }

    fn project(&self) -> Projection {
        let mut computed: Vec<u32> = self.requests.iter().map(|request| request.computed).collect();
        let (mut prefill_streak, mut decodes_due) = (self.prefill_streak, self.decodes_due);
        for step in &self.in_flight {
            for row in &step.rows {
                computed[row.request] += row.tokens;
            }
            (prefill_streak, decodes_due) = Self::after(step, prefill_streak);
        }
        Projection { computed, prefill_streak, decodes_due }
    }

    /// Return the prefill streak and the decode steps due after `step`.
    fn after(step: &Step, prefill_streak: u32) -> (u32, u32) {
        match step.kind {
            Kind::Decode => (0, step.decodes_due.saturating_sub(1)),
            Kind::Prefill => (if step.decode_ready { prefill_streak + 1 } else { 0 }, step.decodes_due),
            Kind::Idle => (prefill_streak, step.decodes_due),
        }
    }

    fn decodes_due(&self, prefill_streak: u32, decodes_due: u32, contested: bool) -> u32 {
        match self.config.max_consecutive_prefill_steps {
            Some(most) if contested && decodes_due == 0 && prefill_streak >= most => self.config.min_decode_steps,
            _ if contested => decodes_due,
            _ => 0,
        }
    }

    fn prefilling(&self, computed: &[u32]) -> Vec<usize> {
        self.running.iter().copied().filter(|&r| computed[r] < self.requests[r].length()).collect()
    }

    fn ready(&self, computed: &[u32]) -> Vec<usize> {
        let ready = |&r: &usize| {
            let request = &self.requests[r];
            let emitted = (computed[r] + 1).saturating_sub(request.length());
            computed[r] >= request.length() && emitted < request.outputs_max
        };
        self.running.iter().copied().filter(ready).collect()
    }

    pub(crate) fn schedule(&mut self, throttle: bool, ahead: bool) -> Option<&Step> {
        if !ahead {
            self.in_flight.clear();
        } else if self.in_flight.len() == 2 {
            return None;
        }
        let Projection { mut computed, prefill_streak, decodes_due } = self.project();
        let prefilling = self.prefilling(&computed);
        let ready = self.ready(&computed);
        let (prefills, refused) = if prefilling.is_empty() {
            self.heads()
        } else {
            (self.pack(&prefilling, &computed), Some(Wait::PrefillInProgress))
        };
        let contested = !prefills.is_empty() && !ready.is_empty();
        let decodes_due = self.decodes_due(prefill_streak, decodes_due, contested);
        let reporting: Vec<usize> = self.in_flight.iter().flat_map(|step| step.finished.clone()).collect();
        let finished = self.ended.iter().copied().filter(|ended| !reporting.contains(ended)).collect();
        let mut step = Step {
            kind: Kind::Idle,
            rows: Vec::new(),
            padded_tokens: 0,
            finished,
            decodes_due,
            decode_ready: !ready.is_empty(),
            contested,
            throttle,
            head_wait: None,
        };
        if !prefills.is_empty() && !(contested && (throttle || decodes_due > 0)) {
            step.kind = Kind::Prefill;
            step.rows = self.prefill(&prefills, &mut computed);
            let total: u32 = step.rows.iter().map(|row| row.tokens).sum();
            step.padded_tokens = fit(self.config.num_batched_tokens_buckets.sizes(), total);
            step.rows.last_mut().unwrap().padded += step.padded_tokens - total;
        } else if !ready.is_empty() {
            step.kind = Kind::Decode;
            step.rows = ready.iter().map(|&request| self.row(request, 1, computed[request])).collect();
            step.padded_tokens = fit(self.config.num_seqs_buckets.sizes(), u32::try_from(ready.len()).unwrap());
        }
        step.head_wait = self.waiting.first().map(|&head| {
            let held_back = if decodes_due > 0 { Wait::Interleave } else { Wait::Throttled };
            let wait = match step.kind {
                Kind::Prefill => refused.unwrap_or(Wait::PrefillInProgress),
                _ if self.running.len() >= self.slots() => Wait::Slots,
                _ if contested && prefilling.is_empty() => held_back,
                _ => refused.unwrap_or(held_back),
            };
            (head, wait)
        });
        self.in_flight.push(step);
        self.in_flight.last()
    }

    /// Return the heads of the queue that are admitted together, and why the next head is not.
    fn heads(&self) -> (Vec<usize>, Option<Wait>) {
        let nothing = vec![0; self.requests.len()];
        let mut admissible = Vec::new();
        let mut reserved = self.reserved();
        for &head in &self.waiting {
            reserved += self.needed_blocks(head);
            if self.running.len() + admissible.len() >= self.slots() || reserved > self.config.num_blocks {
                break;
            }
            admissible.push(head);
        }
        let chosen = self.pack(&admissible, &nothing);
        let Some(&next) = self.waiting.get(chosen.len()) else { return (chosen, None) };
        let with_next = [chosen.clone(), vec![next]].concat();
        let refused = if self.running.len() + chosen.len() >= self.slots() {
            Wait::Slots
        } else if self.pack(&with_next, &nothing) == chosen {
            Wait::PrefillBatchFull
        } else {
            Wait::Kv
        };
        (chosen, Some(refused))
    }

    fn slots(&self) -> usize {
        self.config.max_num_seqs as usize
    }

    fn threshold_applies(&self) -> bool {
        self.config.long_prefill_token_threshold > 0 && self.waiting.len() + self.running.len() > 1
    }

    fn rest(&self, request: usize, computed: u32) -> u32 {
        let request = &self.requests[request];
        if computed == request.hit { request.length() } else { request.length() - computed }
    }

    /// Return the first of `candidates`, and those after it that fit the step in full.
    fn pack(&self, candidates: &[usize], computed: &[u32]) -> Vec<usize> {
        let mut chosen = Vec::new();
        let mut total = 0;
        for &request in candidates {
            total += self.rest(request, computed[request]);
            let full = chosen.len() >= self.config.max_prefills_per_batch as usize
                || total > self.config.prefill_budget()
                || self.threshold_applies();
            if !chosen.is_empty() && full {
                break;
            }
            chosen.push(request);
        }
        chosen
    }

    fn prefill(&mut self, chosen: &[usize], computed: &mut [u32]) -> Vec<PlannedRow> {
        for &request in chosen {
            if self.waiting.contains(&request) {
                self.admit(request);
                computed[request] = self.requests[request].computed;
            }
        }
        let mut rows = Vec::new();
        for &request in chosen {
            let mut tokens = self.requests[request].length() - computed[request];
            if chosen.len() == 1 {
                tokens = tokens.min(self.chunk(self.rest(request, computed[request])));
            }
            rows.push(self.row(request, tokens, computed[request]));
        }
        rows
    }

    fn chunk(&self, rest: u32) -> u32 {
        let chunk = match self.config.chunking {
            Chunking::Fixed => rest.min(self.config.prefill_budget()),
            Chunking::Bucket => chunks::first(rest, &self.config),
        };
        if self.threshold_applies() { chunk.min(self.config.long_prefill_token_threshold) } else { chunk }
    }

    fn admit(&mut self, number: usize) {
        self.waiting.retain(|&other| other != number);
        self.running.push(number);
        let request = &mut self.requests[number];
        request.status = Status::Running;
        let mut end = self.config.block_size;
        while self.config.prefix_caching && end < request.length() {
            let shared = request.content(end).and_then(|content| self.pool.share(&content));
            let Some(block) = shared else { break };
            request.blocks.push(block);
            request.hit = end;
            end += self.config.block_size;
        }
        request.computed = request.hit;
    }

    fn row(&mut self, request: usize, tokens: u32, computed: u32) -> PlannedRow {
        let needed = self.blocks(computed + tokens) as usize;
        while self.requests[request].blocks.len() < needed {
            let block = self.pool.allocate();
            self.requests[request].blocks.push(block);
        }
        let emits = computed + tokens >= self.requests[request].length();
        let blocks = self.requests[request].blocks[..needed].to_vec();
        PlannedRow { request, tokens, padded: tokens, computed, emits, blocks }
    }

    /// Whether `tokens` is valid for the step that is due.
    pub(crate) fn accepts(&self, tokens: Option<&[Option<u32>]>) -> bool {
        let rows = &self.in_flight[0].rows;
        tokens.is_none_or(|tokens| tokens.len() == rows.len())
            && rows.iter().enumerate().all(|(at, row)| {
                let request = &self.requests[row.request];
                let given = tokens.and_then(|tokens| tokens[at]).is_some();
                request.status != Status::Running || if row.emits { given || !request.needs_tokens() } else { !given }
            })
    }

    pub(crate) fn complete(&mut self, tokens: Option<&[Option<u32>]>) -> Vec<Emitted> {
        let step = self.in_flight.remove(0);
        (self.prefill_streak, self.decodes_due) = Self::after(&step, self.prefill_streak);
        self.check_interleave_bound(&step);
        for &ended in &step.finished {
            self.ended.retain(|&other| other != ended);
            self.requests[ended].status = Status::Reported;
        }
        let mut emitted = Vec::new();
        for (at, row) in step.rows.iter().enumerate() {
            if self.requests[row.request].status != Status::Running {
                continue;
            }
            let request = &mut self.requests[row.request];
            request.computed += row.tokens;
            let token = tokens.and_then(|tokens| tokens[at]);
            let mut finish = None;
            if row.emits {
                request.outputs.push(token);
                if token.is_some_and(|token| request.stop.contains(&token)) {
                    finish = Some(Finish::Stop);
                } else if request.outputs.len() == request.outputs_max as usize {
                    finish = Some(Finish::Length);
                }
                emitted.push(Emitted { request: row.request, token, finish });
            }
            self.register(row.request);
            if let Some(finish) = finish {
                self.end(row.request, Status::Finished(finish));
            }
        }
        if self.waiting.is_empty() && self.running.is_empty() {
            self.state = Kind::Idle;
        } else if step.kind != Kind::Idle {
            self.state = step.kind;
        }
        emitted
    }

    fn register(&mut self, number: usize) {
        let request = &self.requests[number];
        for full in 1..=request.computed / self.config.block_size {
            if self.config.prefix_caching
                && let Some(content) = request.content(full * self.config.block_size)
            {
                self.pool.register(request.blocks[full as usize - 1], content);
            }
        }
    }

    /// Check both sides of the interleave bound, with counts independent of the scheduler's.
    fn check_interleave_bound(&mut self, step: &Step) {
        let Some(most) = self.config.max_consecutive_prefill_steps else { return };
        let computed: Vec<u32> = self.requests.iter().map(|request| request.computed).collect();
        for request in self.ready(&computed) {
            let streak = &mut self.requests[request].prefill_streak;
            *streak = if step.kind == Kind::Prefill { *streak + 1 } else { 0 };
            assert!(*streak <= most, "{streak} prefill steps between two decode opportunities of request {request}");
        }
        let held_back = step.kind == Kind::Decode && step.contested && !step.throttle;
        self.decode_streak = if held_back { self.decode_streak + 1 } else { 0 };
        let streak = self.decode_streak;
        assert!(streak <= self.config.min_decode_steps, "{streak} decode steps while a prompt waits");
    }

    pub(crate) fn explain(&self) -> Option<(usize, Wait)> {
        let &head = self.waiting.first()?;
        let Projection { computed, prefill_streak, decodes_due } = self.project();
        let is_running = |row: &PlannedRow| self.requests[row.request].status == Status::Running;
        let planned = self.in_flight.last().filter(|step| step.rows.iter().any(is_running));
        let planned = planned.and_then(|step| step.head_wait).filter(|&(waiting, _)| waiting == head);
        let wait = if self.running.len() >= self.slots() {
            Wait::Slots
        } else if !self.prefilling(&computed).is_empty() {
            Wait::PrefillInProgress
        } else if let Some((_, wait @ (Wait::PrefillInProgress | Wait::PrefillBatchFull))) = planned {
            wait
        } else if self.reserved() + self.needed_blocks(head) > self.config.num_blocks {
            Wait::Kv
        } else if !self.in_flight.is_empty() {
            planned
                .map(|(_, wait)| wait)
                .filter(|wait| matches!(wait, Wait::Interleave | Wait::Throttled))
                .unwrap_or(Wait::StepRunning)
        } else if self.decodes_due(prefill_streak, decodes_due, !self.ready(&computed).is_empty()) > 0 {
            Wait::Interleave
        } else {
            Wait::Ready
        };
        Some((head, wait))
    }

    pub(crate) fn explanation_counts(&self, head: usize) -> (u32, u32, u32) {
        (self.needed_blocks(head), self.reserved(), self.config.num_blocks)
    }
}
