//! The scheduler: its state, planning and completing.

use super::request::{NewMixed, Progress, check_count};
use super::step::{Emitted, Planned, Wait};
use crate::error::Error;
use crate::queue::Fifo;
use crate::request::{Row, Rows};

/// A live request as it was when added.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) start: NewMixed,
    /// Its place in the order of arrival, which is the order of admission as well.
    pub(super) ticket: u64,
}

/// An admitted request: the part that every step reads, kept small.
#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) row: Row,
    pub(super) ticket: u64,
    pub(super) prompt_left: u64,
    /// Outputs left, those of the current [`Run`] not yet taken off.
    pub(super) outputs_left: u64,
}

/// Equal steps in a row: the plan is one decode for everybody who runs, in order.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// Steps of the run that are complete.
    pub(super) done: u64,
    /// Steps until the first request ends, that step included.
    pub(super) left: u64,
}

/// The scheduler. Decides in [`MixedScheduler::schedule`], changes counters in [`MixedScheduler::complete`].
#[derive(Clone, Debug)]
pub struct MixedScheduler {
    pub(super) token_budget: u64,
    pub(super) max_seqs: u64,
    pub(super) kv_tokens: u64,
    pub(super) rows: Rows<Request>,
    pub(super) waiting: Fifo,
    /// Oldest first, which is by ascending ticket.
    pub(super) running: Vec<Running>,
    pub(super) reserved: u64,
    pub(super) plan: Vec<Planned>,
    /// Budget that the plan left over.
    pub(super) spare: u64,
    pub(super) due: bool,
    pub(super) revision: u64,
    pub(super) run: Option<Run>,
    pub(super) emitted: Vec<Emitted>,
}

impl MixedScheduler {
    /// A scheduler for steps of at most `token_budget` tokens, `max_seqs` requests that run at once, and a KV
    /// cache of `kv_tokens` tokens; each from 1 to [`COUNT_MAX`].
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
            rows: Rows::default(),
            waiting: Fifo::default(),
            running: Vec::new(),
            reserved: 0,
            plan: Vec::new(),
            spare: token_budget,
            due: false,
            revision: 0,
            run: None,
            emitted: Vec::new(),
        })
    }

    /// Queues a request. [`Error::NeverFits`] when prompt and outputs are more than the whole KV cache.
    pub fn add(&mut self, request: NewMixed) -> Result<Row, Error> {
        request.check()?;
        let needed = request.reservation();
        if needed > self.kv_tokens {
            return Err(Error::NeverFits { needed, usable: self.kv_tokens, unit: "tokens" });
        }
        let row = self.rows.insert(Request { start: request, ticket: 0 });
        let ticket = self.waiting.push(row);
        if let Some(request) = self.rows.get_mut(row) {
            request.ticket = ticket;
        }
        Ok(row)
    }

    /// Plans the next step. A plan that was not completed is replaced; whom it admitted stays admitted.
    pub fn schedule(&mut self) -> &[Planned] {
        self.due = true;
        if self.run.is_none() || self.head_wait() == Some(Wait::Ready) {
            self.plan_anew();
        }
        debug_assert_eq!(self.check(), Ok(()));
        &self.plan
    }

    pub(super) fn plan_anew(&mut self) {
        self.end_run();
        self.revision += 1;
        self.plan.clear();
        self.spare = self.token_budget;
        let budget = usize::try_from(self.token_budget).unwrap_or(usize::MAX);
        let decoding = self.running.iter().filter(|running| running.prompt_left == 0).take(budget);
        self.plan.extend(decoding.map(|running| Planned { row: running.row, tokens: 1 }));
        let decodes = self.plan.len();
        self.spare -= decodes as u64;

        let everybody_decodes = decodes == self.running.len();
        if !everybody_decodes {
            for running in self.running.iter().filter(|running| running.prompt_left > 0) {
                if self.spare == 0 {
                    break;
                }
                let tokens = running.prompt_left.min(self.spare);
                self.plan.push(Planned { row: running.row, tokens });
                self.spare -= tokens;
            }
        }
        while self.head_wait() == Some(Wait::Ready) {
            let Running { row, prompt_left, .. } = *self.admit_head();
            let tokens = prompt_left.clamp(1, self.spare);
            self.plan.push(Planned { row, tokens });
            self.spare -= tokens;
        }
        if everybody_decodes && self.running[decodes..].iter().all(|admitted| admitted.prompt_left == 0) {
            self.start_run();
        }
    }

    pub(super) fn admit_head(&mut self) -> &Running {
        let row = self.waiting.pop().expect("somebody waits");
        let Request { start, ticket } = self.rows.get(row).expect("who waits is alive");
        self.reserved += start.reservation();
        self.running.push(Running {
            row,
            ticket: *ticket,
            prompt_left: start.prompt_len - start.prefilled,
            outputs_left: start.max_new - start.generated,
        });
        self.running.last().expect("just admitted")
    }

    pub(super) fn start_run(&mut self) {
        let Some(left) = self.running.iter().map(|running| running.outputs_left).min() else { return };
        self.run = Some(Run { done: 0, left });
        self.emitted.clear();
        self.emitted.extend(self.plan.iter().map(|planned| Emitted { row: planned.row, finished: false }));
    }

    pub(super) fn end_run(&mut self) {
        if let Some(Run { done, .. }) = self.run.take() {
            for running in &mut self.running {
                running.outputs_left -= done;
            }
        }
    }

    /// Applies the plan of the last [`MixedScheduler::schedule`], once, and tells who emitted a token, in
    /// order of the plan. Planned requests that were cancelled in between are passed over.
    pub fn complete(&mut self) -> Result<&[Emitted], Error> {
        if !self.due {
            return Err(Error::NotDue("plan: no plan is due: expected schedule() before complete()"));
        }
        self.due = false;
        match &mut self.run {
            Some(run) if run.left > 1 => {
                run.done += 1;
                run.left -= 1;
            }
            _ => self.apply(),
        }
        debug_assert_eq!(self.check(), Ok(()));
        Ok(&self.emitted)
    }

    pub(super) fn apply(&mut self) {
        self.end_run();
        self.emitted.clear();
        let mut some_finished = false;
        // Mostly the plan goes along `running`, from each request to the next.
        let mut next = 0;
        for &Planned { row, tokens } in &self.plan {
            let place = match self.running.get(next) {
                Some(running) if running.row == row => Some(next),
                _ => self.rows.get(row).and_then(|request| place_of(&self.running, request.ticket)),
            };
            let Some(place) = place else { continue };
            next = place + 1;
            let running = &mut self.running[place];
            if running.prompt_left > tokens {
                running.prompt_left -= tokens;
                continue;
            }
            running.prompt_left = 0;
            running.outputs_left -= 1;
            let finished = running.outputs_left == 0;
            if finished {
                some_finished = true;
                let request = self.rows.remove(row).expect("who runs is alive");
                self.reserved -= request.start.reservation();
            }
            self.emitted.push(Emitted { row, finished });
        }
        if some_finished {
            self.running.retain(|running| running.outputs_left > 0);
        }
    }

    /// How many steps equal to the pending one are certain to come, the pending one included, were nothing
    /// added or cancelled: more than 1 only when the plan is one decode for everybody who runs.
    pub fn decode_horizon(&self) -> u64 {
        match &self.run {
            Some(run) if self.due && self.head_wait() != Some(Wait::Ready) => run.left,
            _ => 1,
        }
    }

    /// The same as `times` rounds of complete and schedule, the last schedule left out; at most
    /// [`MixedScheduler::decode_horizon`]. The answer is that of the last round.
    pub fn complete_decodes(&mut self, times: u64) -> Result<&[Emitted], Error> {
        let horizon = self.decode_horizon();
        if !(1..=horizon).contains(&times) {
            return Err(Error::invalid("times", times, format!("a whole number from 1 to {horizon}")));
        }
        if let Some(run) = &mut self.run
            && self.due
        {
            run.done += times - 1;
            run.left -= times - 1;
        }
        self.complete()
    }

    /// Ends a request wherever it is and frees its reservation at once. `None` when it is gone already.
    pub fn cancel(&mut self, row: Row) -> Option<Progress> {
        let progress = self.progress(row)?;
        let Request { start, ticket } = self.rows.remove(row)?;
        if let Some(place) = place_of(&self.running, ticket) {
            self.end_run();
            self.running.remove(place);
            self.reserved -= start.reservation();
        } else {
            self.waiting.remove(ticket);
        }
        debug_assert_eq!(self.check(), Ok(()));
        Some(progress)
    }

    /// How far a live request has come.
    pub fn progress(&self, row: Row) -> Option<Progress> {
        let Request { start, ticket } = self.rows.get(row)?;
        let Some(place) = place_of(&self.running, *ticket) else {
            return Some(Progress { prefilled: start.prefilled, generated: start.generated });
        };
        let running = &self.running[place];
        let done = self.run.as_ref().map_or(0, |run| run.done);
        Some(Progress {
            prefilled: start.prompt_len - running.prompt_left,
            generated: start.max_new - running.outputs_left + done,
        })
    }

    /// Whether a live request runs; it waits otherwise.
    pub fn is_running(&self, row: Row) -> Option<bool> {
        self.rows.get(row).map(|request| place_of(&self.running, request.ticket).is_some())
    }

    /// The plan whose completion is due, as the last schedule gave it.
    pub fn plan(&self) -> Option<&[Planned]> {
        self.due.then_some(&self.plan)
    }

    /// A number that changes whenever a plan is worked out anew: as long as it stays, so does the plan.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Whether completing the plan moves nothing but counters: everybody planned emits, nobody ends, and the
    /// next plan is the same one unless somebody is admitted or cancelled.
    pub fn is_steady(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.left > 1)
    }

    /// What keeps the head of the waiting queue from running; `None` when nobody waits.
    pub fn head_wait(&self) -> Option<Wait> {
        let head = self.rows.get(self.waiting.head()?)?;
        Some(if self.spare == 0 {
            Wait::Budget
        } else if self.running.len() as u64 >= self.max_seqs {
            Wait::Slots
        } else if self.reserved + head.start.reservation() > self.kv_tokens {
            Wait::Kv
        } else {
            Wait::Ready
        })
    }

    /// KV tokens reserved by those who run.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Number of requests that wait.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Number of requests that run.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// All that wait, oldest first.
    pub fn waiting(&self) -> impl Iterator<Item = Row> + '_ {
        self.waiting.iter()
    }

    /// All that run, oldest first.
    pub fn running(&self) -> impl Iterator<Item = Row> + '_ {
        self.running.iter().map(|running| running.row)
    }

    /// The waiting request at `position`, counted from the oldest.
    pub fn waiting_at(&mut self, position: usize) -> Option<Row> {
        self.waiting.get(position)
    }

    /// The running request at `position`, counted from the oldest.
    pub fn running_at(&self, position: usize) -> Option<Row> {
        self.running.get(position).map(|running| running.row)
    }

    /// Bytes of memory held, spare room included.
    pub fn heap_bytes(&self) -> usize {
        self.rows.heap_bytes()
            + self.waiting.heap_bytes()
            + self.running.capacity() * size_of::<Running>()
            + self.plan.capacity() * size_of::<Planned>()
            + self.emitted.capacity() * size_of::<Emitted>()
    }
}

/// Where in `running` the request with that ticket stands.
pub(super) fn place_of(running: &[Running], ticket: u64) -> Option<usize> {
    running.binary_search_by_key(&ticket, |running| running.ticket).ok()
}

#[cfg(test)]
mod tests {
    use super::super::request::COUNT_MAX;
    use super::*;

    fn new(prompt_len: u64, max_new: u64) -> NewMixed {
        NewMixed { prompt_len, max_new, prefilled: 0, generated: 0 }
    }

    /// Everything a caller can see, after a step.
    fn seen(s: &MixedScheduler) -> (Vec<Row>, Vec<Option<Progress>>, u64, Option<Wait>) {
        let running: Vec<Row> = s.running().collect();
        let progress = running.iter().map(|&row| s.progress(row)).collect();
        (running, progress, s.reserved(), s.head_wait())
    }

    #[test]
    fn a_jump_over_decodes_equals_stepping() {
        let mut jumping = MixedScheduler::new(8, 3, 60).unwrap();
        for (prompt, outputs) in [(3, 7), (2, 4), (9, 12), (4, 2), (1, 1)] {
            jumping.add(new(prompt, outputs)).unwrap();
        }
        let mut stepping = jumping.clone();
        let mut jumps = Vec::new();
        while !jumping.schedule().is_empty() {
            let times = jumping.decode_horizon();
            jumps.push(times);
            let jumped = jumping.complete_decodes(times).unwrap().to_vec();
            let mut stepped = Vec::new();
            for _ in 0..times {
                stepping.schedule();
                stepped = stepping.complete().unwrap().to_vec();
            }
            assert_eq!(jumped, stepped);
            assert_eq!(seen(&jumping), seen(&stepping));
        }
        assert_eq!(jumps, [1, 1, 2, 1, 1, 1, 6]);
        assert_eq!((jumping.reserved(), stepping.schedule()), (0, [].as_slice()));
    }

    #[test]
    fn a_jump_beyond_the_horizon_is_refused() {
        let mut s = MixedScheduler::new(8, 2, 60).unwrap();
        assert!(matches!(s.complete_decodes(1), Err(Error::NotDue(_))));
        s.add(new(1, 5)).unwrap();
        s.schedule();
        assert_eq!(s.decode_horizon(), 1, "the step has a prompt in it");
        s.complete().unwrap();
        s.schedule();
        assert_eq!(s.decode_horizon(), 4);
        for times in [0, 5] {
            assert!(matches!(s.complete_decodes(times), Err(Error::Invalid(_))));
        }
        s.add(new(1, 1)).unwrap();
        assert_eq!(s.decode_horizon(), 1, "the next step admits somebody");
        assert_eq!(s.complete_decodes(1).unwrap().len(), 1);
        assert_eq!(s.schedule().len(), 2);
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
