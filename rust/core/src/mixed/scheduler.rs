//! The state of the token-budget scheduler, and how requests are added and cancelled.

use super::request::{NewMixed, Progress, check_count};
use super::step::{Emitted, Planned, Wait};
use crate::error::Error;
use crate::queue::Fifo;
use crate::request::{Row, Slab};

/// A live request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// The counts of the request when it was added.
    pub(super) added: NewMixed,
    /// Number of the request in order of arrival, which is the order of admission too.
    pub(super) ticket: u64,
}

/// The fields of a running request that every step reads.
#[derive(Clone, Debug)]
pub(super) struct RunningRequest {
    pub(super) row: Row,
    pub(super) ticket: u64,
    /// Prompt tokens left to compute.
    pub(super) prompt_left: u64,
    /// Output tokens left to generate, at the start of the current [`DecodeRun`] if there is one.
    pub(super) outputs_left: u64,
}

/// A run of identical decode steps: the plan is one token for each running request, in order.
#[derive(Clone, Debug)]
pub(super) struct DecodeRun {
    /// Completed steps of the run.
    pub(super) completed: u64,
    /// Steps until the first request finishes, including the step in which it does.
    pub(super) remaining: u64,
}

/// Scheduler with steps that mix prefill and decode under a token budget.
///
/// [`MixedScheduler::schedule`] admits requests and plans a step, [`MixedScheduler::complete`] changes their counts.
#[derive(Clone, Debug)]
pub struct MixedScheduler {
    pub(super) token_budget: u64,
    pub(super) max_seqs: u64,
    pub(super) kv_tokens: u64,
    pub(super) requests: Slab<Request>,
    pub(super) waiting: Fifo,
    /// Oldest first, so tickets are ascending.
    pub(super) running: Vec<RunningRequest>,
    pub(super) reserved: u64,
    pub(super) plan: Vec<Planned>,
    /// Tokens of the budget that the plan does not use.
    pub(super) unused_budget: u64,
    /// Whether the plan is not completed yet.
    pub(super) due: bool,
    pub(super) revision: u64,
    pub(super) decode_run: Option<DecodeRun>,
    pub(super) emitted: Vec<Emitted>,
}

impl MixedScheduler {
    /// Return a scheduler for steps of at most `token_budget` tokens, `max_seqs` running requests, and a KV cache of
    /// `kv_tokens` tokens. Returns [`Error::Invalid`] unless each is from 1 to [`COUNT_MAX`].
    ///
    /// [`COUNT_MAX`]: super::COUNT_MAX
    pub fn new(token_budget: u64, max_seqs: u64, kv_tokens: u64) -> Result<Self, Error> {
        let mut faults = Vec::new();
        check_count(&mut faults, "token_budget", token_budget);
        check_count(&mut faults, "max_seqs", max_seqs);
        check_count(&mut faults, "kv_tokens", kv_tokens);
        if !faults.is_empty() {
            return Err(Error::Invalid(faults));
        }
        Ok(Self {
            token_budget,
            max_seqs,
            kv_tokens,
            requests: Slab::default(),
            waiting: Fifo::default(),
            running: Vec::new(),
            reserved: 0,
            plan: Vec::new(),
            unused_budget: token_budget,
            due: false,
            revision: 0,
            decode_run: None,
            emitted: Vec::new(),
        })
    }

    /// Add a request to the queue.
    ///
    /// Returns [`Error::Invalid`] for counts out of range, and [`Error::NeverFits`] if prompt and outputs are larger
    /// than the whole KV cache.
    pub fn add(&mut self, request: NewMixed) -> Result<Row, Error> {
        request.check()?;
        let needed = request.reservation();
        if needed > self.kv_tokens {
            return Err(Error::NeverFits { needed, usable: self.kv_tokens, unit: "tokens" });
        }
        let row = self.requests.insert(Request { added: request, ticket: 0 });
        let ticket = self.waiting.push(row);
        if let Some(request) = self.requests.get_mut(row) {
            request.ticket = ticket;
        }
        Ok(row)
    }

    /// Cancel a waiting or running request, release its reservation at once, and return its progress. Returns `None` if
    /// the request has ended already.
    pub fn cancel(&mut self, row: Row) -> Option<Progress> {
        let progress = self.progress(row)?;
        let Request { added, ticket } = self.requests.remove(row)?;
        if let Some(position) = running_position(&self.running, ticket) {
            self.end_decode_run();
            self.running.remove(position);
            self.reserved -= added.reservation();
        } else {
            self.waiting.remove(ticket);
        }
        debug_assert_eq!(self.check(), Ok(()));
        Some(progress)
    }

    /// Return the progress of a live request, or `None` if it has ended.
    pub fn progress(&self, row: Row) -> Option<Progress> {
        let Request { added, ticket } = self.requests.get(row)?;
        let Some(position) = running_position(&self.running, *ticket) else {
            return Some(Progress { prefilled: added.prefilled, generated: added.generated });
        };
        let running = &self.running[position];
        let completed = self.decode_run.as_ref().map_or(0, |run| run.completed);
        Some(Progress {
            prefilled: added.prompt_len - running.prompt_left,
            generated: added.max_new - running.outputs_left + completed,
        })
    }

    /// Return whether a live request is running (`true`) or waiting (`false`), or `None` if it has ended.
    pub fn is_running(&self, row: Row) -> Option<bool> {
        self.requests.get(row).map(|request| running_position(&self.running, request.ticket).is_some())
    }

    /// Return why the head of the waiting queue is not admitted, or `None` if no request is waiting.
    pub fn head_wait(&self) -> Option<Wait> {
        let head = self.requests.get(self.waiting.head()?)?;
        Some(if self.unused_budget == 0 {
            Wait::Budget
        } else if self.running.len() as u64 >= self.max_seqs {
            Wait::Slots
        } else if self.reserved + head.added.reservation() > self.kv_tokens {
            Wait::Kv
        } else {
            Wait::Ready
        })
    }

    /// Number of KV tokens reserved by running requests.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Number of waiting requests.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Number of running requests.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Return all waiting requests, oldest first.
    pub fn waiting(&self) -> impl Iterator<Item = Row> + '_ {
        self.waiting.iter()
    }

    /// Return all running requests, oldest first.
    pub fn running(&self) -> impl Iterator<Item = Row> + '_ {
        self.running.iter().map(|running| running.row)
    }

    /// Return the waiting request at `position`, where 0 is the oldest.
    pub fn waiting_at(&mut self, position: usize) -> Option<Row> {
        self.waiting.get(position)
    }

    /// Return the running request at `position`, where 0 is the oldest.
    pub fn running_at(&self, position: usize) -> Option<Row> {
        self.running.get(position).map(|running| running.row)
    }

    /// Bytes of heap memory held, unused capacity included.
    pub fn heap_bytes(&self) -> usize {
        self.requests.heap_bytes()
            + self.waiting.heap_bytes()
            + self.running.capacity() * size_of::<RunningRequest>()
            + self.plan.capacity() * size_of::<Planned>()
            + self.emitted.capacity() * size_of::<Emitted>()
    }
}

/// Return the position in `running` of the request with `ticket`.
pub(super) fn running_position(running: &[RunningRequest], ticket: u64) -> Option<usize> {
    running.binary_search_by_key(&ticket, |running| running.ticket).ok()
}

#[cfg(test)]
mod tests {
    use super::super::request::COUNT_MAX;
    use super::*;

    fn new(prompt_len: u64, max_new: u64) -> NewMixed {
        NewMixed { prompt_len, max_new, prefilled: 0, generated: 0 }
    }

    #[test]
    fn the_head_waits_for_budget_slots_or_kv() {
        let mut s = MixedScheduler::new(4, 2, 20).unwrap();
        assert_eq!(s.head_wait(), None);
        s.add(new(6, 2)).unwrap();
        s.add(new(6, 7)).unwrap();
        assert_eq!(s.head_wait(), Some(Wait::Ready));
        s.schedule();
        assert_eq!(s.head_wait(), Some(Wait::Budget));
        s.complete().unwrap();
        s.schedule();
        assert_eq!(s.head_wait(), Some(Wait::Kv), "8 + 13 > 20");
        let head = s.waiting_at(0).unwrap();
        s.cancel(head);
        s.add(new(1, 1)).unwrap();
        s.add(new(1, 1)).unwrap();
        assert_eq!(s.schedule().len(), 2);
        assert_eq!(s.head_wait(), Some(Wait::Slots));
    }

    #[test]
    fn x01_bad_counts_are_named_and_change_nothing() {
        let Err(Error::Invalid(faults)) = MixedScheduler::new(0, COUNT_MAX + 1, 1) else { panic!("accepted") };
        assert_eq!(faults.iter().map(|fault| fault.field).collect::<Vec<_>>(), ["token_budget", "max_seqs"]);
        let mut s = MixedScheduler::new(COUNT_MAX, COUNT_MAX, COUNT_MAX).unwrap();
        let bad = NewMixed { prompt_len: 0, max_new: u64::MAX, prefilled: 1, generated: u64::MAX };
        let Err(Error::Invalid(faults)) = s.add(bad) else { panic!("accepted") };
        assert_eq!(
            faults.iter().map(|fault| fault.field).collect::<Vec<_>>(),
            ["prompt_len", "max_new", "prefilled", "generated"]
        );
        let never = s.add(new(COUNT_MAX, 1));
        assert_eq!(never, Err(Error::NeverFits { needed: COUNT_MAX + 1, usable: COUNT_MAX, unit: "tokens" }));
        assert_eq!((s.num_waiting(), s.schedule().len()), (0, 0));
        s.add(new(COUNT_MAX - 1, 1)).unwrap();
        assert_eq!(s.schedule()[0].tokens, COUNT_MAX - 1);
        assert!(s.complete().unwrap()[0].finished);
    }

    #[test]
    fn x03_a_waiting_request_takes_less_than_200_bytes() {
        let mut s = MixedScheduler::new(1, 1, 10).unwrap();
        for requests in 1..=5_000 {
            s.add(new(1, 1)).unwrap();
            assert!(requests < 8 || s.heap_bytes() < 200 * requests, "{} bytes for {requests}", s.heap_bytes());
        }
    }
}
