//! The replay loop: adds requests when they arrive, plans and completes steps, and advances the clock.

use std::ops::ControlFlow;

use super::cost::Cost;
use super::counters::Counters;
use super::decimal::UNITS_MAX;
use super::engine::{Added, Decision, Engine};
use super::options::{Options, Progress};
use super::report::{Record, Report, Summary};
use super::steps::{Entry, Steps};

use super::workload::Arrival;
use crate::decide::Kind;
use crate::error::Error;
use crate::request::Row;

/// Number of decisions between two calls of the observer: about a millisecond.
const OBSERVE_EVERY: u32 = 1024;

pub(super) struct Drive<'a, E> {
    engine: E,
    workload: &'a [Arrival],
    cost: &'a Cost,
    one_by_one: bool,
    /// Positions in the workload, sorted by arrival; ties keep the order of the workload.
    order: Vec<u32>,
    /// Number of requests in `order` that were added.
    added: usize,
    /// Current time in nanoseconds from time zero.
    clock: u64,
    /// End of the last step.
    makespan: u64,
    records: Vec<Record>,
    refused: Vec<u32>,
    completed: usize,
    /// Position in the workload of each live request, by row index.
    requests: Vec<u32>,
    counters: Counters,
    steps: Option<Steps>,
}

impl<'a, E: Engine> Drive<'a, E> {
    pub(super) fn new(engine: E, workload: &'a [Arrival], cost: &'a Cost, options: Options) -> Self {
        let count = u32::try_from(workload.len()).expect("fewer than 2^32 requests");
        let mut order: Vec<u32> = (0..count).collect();
        order.sort_by_key(|&request| workload[request as usize].at);
        let earliest = order.first().map_or(0, |&first| workload[first as usize].at);
        let record = |arrival: &Arrival| Record { arrival: arrival.at - earliest, ..Record::default() };
        Self {
            engine,
            workload,
            cost,
            one_by_one: options.one_by_one,
            order,
            added: 0,
            clock: 0,
            makespan: 0,
            records: workload.iter().map(record).collect(),
            refused: Vec::new(),
            completed: 0,
            requests: Vec::new(),
            counters: Counters::default(),
            steps: options.record_steps.then(Steps::default),
        }
    }

    pub(super) fn run(
        mut self,
        observer: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Option<Report>, Error> {
        let mut unobserved = 0;
        loop {
            self.add_arrivals()?;
            if let Some(decision) = self.engine.decide()? {
                self.step(decision)?;
            } else if let Some(next) = self.next_arrival() {
                self.clock = next;
            } else {
                break;
            }
            unobserved += 1;
            if unobserved == OBSERVE_EVERY {
                unobserved = 0;
                if observer(self.progress()).is_break() {
                    return Ok(None);
                }
            }
        }
        let Progress { done, total } = self.progress();
        if done != total {
            let unfinished = total - done;
            return Err(Error::InvariantViolated(format!(
                "the scheduler is idle with {unfinished} unfinished requests"
            )));
        }
        if observer(self.progress()).is_break() {
            return Ok(None);
        }
        let summary = Summary::new(&self.records, self.refused.len() as u64, self.makespan, self.counters);
        Ok(Some(Report { summary, records: self.records, refused: self.refused, steps: self.steps }))
    }

    fn progress(&self) -> Progress {
        Progress { done: self.completed + self.refused.len(), total: self.workload.len() }
    }

    fn next_arrival(&self) -> Option<u64> {
        self.order.get(self.added).map(|&request| self.records[request as usize].arrival)
    }

    /// Add the requests that have arrived.
    fn add_arrivals(&mut self) -> Result<(), Error> {
        while let Some(&request) = self.order.get(self.added)
            && self.records[request as usize].arrival <= self.clock
        {
            self.added += 1;
            match self.engine.add(&self.workload[request as usize])? {
                Added::Accepted(row, outputs) => {
                    if self.requests.len() <= row.index() {
                        self.requests.resize(row.index() + 1, 0);
                    }
                    self.requests[row.index()] = request;
                    self.records[request as usize].outputs = outputs;
                }
                Added::Refused(refusal) => {
                    self.records[request as usize].refusal = Some(refusal);
                    self.refused.push(request);
                }
            }
        }
        Ok(())
    }

    /// Run the planned step together with the identical steps guaranteed to follow it before the next arrival.
    fn step(&mut self, decision: Decision) -> Result<(), Error> {
        let (start, time) = (self.clock, decision.time(self.cost));
        let horizon = if decision.is_prefill() || self.one_by_one { 1 } else { self.engine.horizon() };
        let times = self.until_arrival(horizon, time);
        let end = time.checked_mul(times).and_then(|time| start.checked_add(time)).filter(|&end| end <= UNITS_MAX);
        let Some(end) = end else {
            return Err(Error::invalid("cost", time, "steps that end within 2^63 nanoseconds of time zero"));
        };
        if let Some(reason) = self.engine.wait() {
            self.counters.waits.add(reason, end - start);
        }
        let run = (start, time, times);
        if decision.is_prefill() {
            self.record_starts(decision, start);
        }
        self.record_steps(decision, run);
        self.counters.step(decision, E::PADS, run);
        self.clock = end;
        self.makespan = end;
        self.engine.complete(times, |row, finished| {
            let record = &mut self.records[self.requests[row.index()] as usize];
            if record.first_token.is_none() {
                record.first_token = Some(end);
                if !finished {
                    self.counters.gaps.first_token(end);
                }
            }
            if finished {
                record.end = Some(end);
                self.completed += 1;
            }
        })
    }

    /// Return how many of `horizon` identical steps start before the next arrival.
    fn until_arrival(&self, horizon: u64, time: u64) -> u64 {
        match self.next_arrival() {
            Some(next) if time > 0 => horizon.min((next - self.clock).div_ceil(time)),
            _ => horizon,
        }
    }

    /// Record `now` as the start of each prefilling request of the planned step that has not started before.
    fn record_starts(&mut self, decision: Decision, now: u64) {
        for (row, _) in self.engine.entries().skip(decision.decodes as usize) {
            self.records[self.requests[row.index()] as usize].start.get_or_insert(now);
        }
    }

    /// Record a run of identical steps, if steps are recorded. `run` is the start, the duration and the number.
    fn record_steps(&mut self, decision: Decision, run: (u64, u64, u64)) {
        let Some(steps) = &mut self.steps else { return };
        let (kind, padded) = match (decision.is_prefill(), E::PADS) {
            (true, true) => (Kind::Prefill, decision.prompt_padded),
            (true, false) => (Kind::Prefill, decision.prompt + decision.decodes),
            (false, _) => (Kind::Decode, decision.decodes_padded),
        };
        let requests = &self.requests;
        let entry = |(row, tokens): (Row, u32)| Entry { request: requests[row.index()], tokens };
        steps.push(run, kind, padded, self.engine.entries().map(entry));
    }
}
