//! The requests of a worker, and the steps in flight.

use std::collections::VecDeque;

use super::plan::{Plan, Planned};
use super::request::Request;
use super::scheduled::{RequestUpdate, ScheduledRow, ScheduledStep};
use crate::error::{Error, Fault};
use crate::fill::{DecodeRow, Layout, PrefillRow, Seen};
use crate::request::{Row, Slab, UNKNOWN_TOKEN};

/// Tokens, KV blocks and sampling parameters of the requests that a worker runs.
#[derive(Clone, Debug)]
pub struct Worker {
    pub(super) layout: Layout,
    pub(super) requests: Slab<Request>,
    pub(super) in_flight: VecDeque<Vec<InFlightRow>>,
    pub(super) seen: Seen,
}

const PLANNED: &str = "`plan` has found the request of every row";

/// A row of a step in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlightRow {
    pub(super) row: Row,
    /// [`Request::resets`] when the step was filled.
    pub(super) resets: u32,
    pub(super) planned: Planned,
}

impl Worker {
    /// Return a worker without requests.
    pub fn new(layout: Layout) -> Self {
        Self { layout, requests: Slab::default(), in_flight: VecDeque::new(), seen: Seen::default() }
    }

    /// Return the number of known requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Return whether no request is known.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Return the number of steps in flight: filled and not accepted yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Set the unknown tokens of decode rows from the caller's `tokens`, by row; empty for a prefill. An error names a
    /// row if its token stays unknown, or if its known token differs.
    pub fn supply_tokens(&self, plan: &mut Plan, tokens: &[Option<u32>]) -> Result<(), Error> {
        for (at, row) in plan.rows.iter_mut().enumerate() {
            let fault = |fault| Error::Row { at, fault };
            if let Some(token) = tokens.get(at).copied().flatten() {
                if row.token != UNKNOWN_TOKEN && row.token != token {
                    let expected = format!("None or {}, which was accepted", row.token);
                    return Err(fault(Fault::new("tokens", token, expected)));
                }
                self.check_tokens("tokens", &[token]).map_err(fault)?;
                row.token = token;
            }
            if row.token == UNKNOWN_TOKEN {
                let expected = "a token passed to fill(), or accept() called for the step that samples it";
                return Err(fault(Fault::new("tokens", format!("none at position {}", row.start), expected)));
            }
        }
        Ok(())
    }

    /// Remove finished requests.
    pub fn finish(&mut self, finished: &[Row]) {
        for &row in finished {
            self.requests.remove(row);
        }
    }

    /// Apply a plan without unknown tokens, and return the handles of its rows. Between [`Worker::plan`] and this call,
    /// no call but [`Worker::accept`] may change the worker.
    pub fn commit(&mut self, step: ScheduledStep, plan: Plan) -> impl Iterator<Item = Row> + '_ {
        self.finish(&step.finished);
        let rows = step.rows.into_iter().zip(plan.rows);
        let filled = rows.map(|(scheduled, planned)| self.update(scheduled, planned)).collect();
        self.in_flight.push_back(filled);
        self.newest_step().map(|filled| filled.row)
    }

    fn update(&mut self, ScheduledRow { update, blocks, .. }: ScheduledRow, planned: Planned) -> InFlightRow {
        let row = match update {
            RequestUpdate::New { tokens, prompt, sampling, replaces } => {
                if let Some(row) = replaces {
                    self.requests.remove(row);
                }
                let prompt = u32::try_from(prompt).expect("a prompt has fewer than 2^32 tokens");
                self.requests.insert(Request { tokens, blocks, prompt, sampling, end: 0, resets: 0 })
            }
            RequestUpdate::Known { row, outputs } => {
                let request = self.requests.get_mut(row).expect(PLANNED);
                request.blocks.extend_from_slice(&blocks);
                request.truncate_outputs(outputs);
                row
            }
            RequestUpdate::Resumed { row, outputs, tokens } => {
                let request = self.requests.get_mut(row).expect(PLANNED);
                (request.tokens, request.blocks) = (tokens, blocks);
                request.truncate_outputs(outputs);
                request.resets += 1;
                row
            }
        };
        let request = self.requests.get_mut(row).expect(PLANNED);
        request.schedule(planned.start, planned.end);
        InFlightRow { row, resets: request.resets, planned }
    }

    fn newest_step(&self) -> impl Iterator<Item = &InFlightRow> {
        self.in_flight.back().into_iter().flatten()
    }

    /// Return the rows of the step committed last, a prefill.
    pub fn prefill_rows(&self) -> impl Iterator<Item = PrefillRow<'_>> {
        self.newest_step().map(|&InFlightRow { row, planned: Planned { start, end, .. }, .. }| {
            let Request { tokens, blocks, sampling, .. } = self.requests.get(row).expect(PLANNED);
            PrefillRow { tokens: &tokens[start as usize..end as usize], start, blocks, sampling: *sampling }
        })
    }

    /// Return the rows of the step committed last, a decode.
    pub fn decode_rows(&self) -> impl Iterator<Item = DecodeRow<'_>> {
        self.newest_step().map(|&InFlightRow { row, planned: Planned { start, token, .. }, .. }| {
            let Request { blocks, sampling, .. } = self.requests.get(row).expect(PLANNED);
            DecodeRow { token, position: start, blocks, sampling: *sampling, drafts: 0 }
        })
    }

    /// Check that a step is in flight and that the oldest one has `entries` rows.
    pub fn check_due(&self, entries: usize) -> Result<(), Error> {
        let Some(filled) = self.in_flight.front() else {
            return Err(Error::NotDue("accept: no step is in flight"));
        };
        if filled.len() != entries {
            let (value, rows) = (format!("{entries} entries"), filled.len());
            return Err(Error::invalid("sampled", value, format!("one for each of {rows} rows")));
        }
        Ok(())
    }

    /// Append the tokens sampled by the oldest step in flight: one for each row that emits, `None` for a chunk that
    /// does not end its prompt. The entry of a request that was removed or reset since is ignored.
    pub fn accept(&mut self, sampled: &[Option<u32>]) -> Result<(), Error> {
        self.check_due(sampled.len())?;
        let filled = self.in_flight.front().expect("a step is due");
        for (at, (&InFlightRow { row, resets, planned }, &token)) in filled.iter().zip(sampled).enumerate() {
            if self.requests.get(row).is_some_and(|request| request.resets == resets) {
                self.check_sampled(planned, token).map_err(|fault| Error::Row { at, fault })?;
            }
        }
        let filled = self.in_flight.pop_front().expect("a step is due");
        for (InFlightRow { row, resets, planned }, &token) in filled.into_iter().zip(sampled) {
            let current = self.requests.get_mut(row).filter(|request| request.resets == resets);
            if let (Some(request), Some(token)) = (current, token) {
                request.append_sampled(planned.end, token);
            }
        }
        Ok(())
    }

    fn check_sampled(&self, planned: Planned, token: Option<u32>) -> Result<(), Fault> {
        match token {
            Some(token) if planned.emits => self.check_tokens("sampled", &[token]),
            Some(token) => Err(Fault::new("sampled", token, "[] for a chunk in the middle of a prompt")),
            None if planned.emits => Err(Fault::new("sampled", "[]", "one token")),
            None => Ok(()),
        }
    }
}
