//! The requests that a worker knows, and the steps in flight.

use std::collections::VecDeque;

use super::message::{Told, ToldRow, Who};
use super::plan::{Plan, Planned};
use super::request::Request;

use crate::error::{Error, Fault};
use crate::fill::{DecodeRow, Layout, PrefillRow, Seen};
use crate::request::{Row, Rows, UNKNOWN_TOKEN};

/// Tokens, blocks and sampling of the requests that a worker runs.
#[derive(Clone, Debug)]
pub struct Worker {
    pub(super) layout: Layout,
    pub(super) requests: Rows<Request>,
    pub(super) in_flight: VecDeque<Vec<Filled>>,
    pub(super) seen: Seen,
}

const PLANNED: &str = "a plan has found every request of its rows";

/// A row of a step that was filled and whose outcome is not known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filled {
    pub(super) row: Row,
    /// That of the request then.
    pub(super) turn: u32,
    pub(super) planned: Planned,
}

impl Worker {
    /// Knows nobody yet.
    pub fn new(layout: Layout) -> Self {
        Self { layout, requests: Rows::default(), in_flight: VecDeque::new(), seen: Seen::default() }
    }

    /// Requests that are known.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether nobody is known.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Steps that were filled and not accepted.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Sets the tokens of decode rows that the caller knows, by row; none for a prefill. Refused while one is unknown.
    pub fn give(&self, plan: &mut Plan, given: &[Option<u32>]) -> Result<(), Error> {
        for (at, row) in plan.rows.iter_mut().enumerate() {
            let fault = |fault| Error::Row { at, fault };
            if let Some(token) = given.get(at).copied().flatten() {
                if row.token != UNKNOWN_TOKEN && row.token != token {
                    let expected = format!("None or {}, which was accepted", row.token);
                    return Err(fault(Fault::new("tokens", token, expected)));
                }
                self.check_tokens("tokens", &[token]).map_err(fault)?;
                row.token = token;
            }
            if row.token == UNKNOWN_TOKEN {
                let expected = "that of fill(), or that of the step that samples it, by accept(), before";
                return Err(fault(Fault::new("tokens", format!("none at position {}", row.start), expected)));
            }
        }
        Ok(())
    }

    /// Forgets who ended.
    pub fn finish(&mut self, finished: &[Row]) {
        for &row in finished {
            self.requests.remove(row);
        }
    }

    /// Does what was planned, all tokens of which are known; at most, steps were accepted since. Returns the handles
    /// of the rows.
    pub fn commit(&mut self, told: Told, plan: Plan) -> impl Iterator<Item = Row> + '_ {
        self.finish(&told.finished);
        let rows = told.rows.into_iter().zip(plan.rows);
        let filled = rows.map(|(told, planned)| self.update(told, planned)).collect();
        self.in_flight.push_back(filled);
        self.last().map(|filled| filled.row)
    }

    fn update(&mut self, ToldRow { who, blocks, .. }: ToldRow, planned: Planned) -> Filled {
        let row = match who {
            Who::New { tokens, prompt, sampling, replaces } => {
                if let Some(row) = replaces {
                    self.requests.remove(row);
                }
                let prompt = u32::try_from(prompt).expect("a prompt has fewer than 2^32 tokens");
                self.requests.insert(Request { tokens, blocks, prompt, sampling, end: 0, turn: 0 })
            }
            Who::Known { row, outputs } => {
                let request = self.requests.get_mut(row).expect(PLANNED);
                request.blocks.extend_from_slice(&blocks);
                request.forget(outputs);
                row
            }
            Who::Resumed { row, outputs, tokens } => {
                let request = self.requests.get_mut(row).expect(PLANNED);
                (request.tokens, request.blocks) = (tokens, blocks);
                request.forget(outputs);
                request.turn += 1;
                row
            }
        };
        let request = self.requests.get_mut(row).expect(PLANNED);
        request.go_on(planned.start, planned.end);
        Filled { row, turn: request.turn, planned }
    }

    fn last(&self) -> impl Iterator<Item = &Filled> {
        self.in_flight.back().into_iter().flatten()
    }

    /// The rows of the step that was just committed, a prefill.
    pub fn prefill_rows(&self) -> impl Iterator<Item = PrefillRow<'_>> {
        self.last().map(|&Filled { row, planned: Planned { start, end, .. }, .. }| {
            let Request { tokens, blocks, sampling, .. } = self.requests.get(row).expect(PLANNED);
            PrefillRow { tokens: &tokens[start as usize..end as usize], start, blocks, sampling: *sampling }
        })
    }

    /// The rows of the step that was just committed, a decode.
    pub fn decode_rows(&self) -> impl Iterator<Item = DecodeRow<'_>> {
        self.last().map(|&Filled { row, planned: Planned { start, token, .. }, .. }| {
            let Request { blocks, sampling, .. } = self.requests.get(row).expect(PLANNED);
            DecodeRow { token, position: start, blocks, sampling: *sampling, drafts: 0 }
        })
    }

    /// Refuses entries that are not one for each row of the oldest step in flight, or for which no step is in flight.
    pub fn check_due(&self, entries: usize) -> Result<(), Error> {
        let Some(filled) = self.in_flight.front() else {
            return Err(Error::NotDue("accept: no step was filled that was not accepted"));
        };
        if filled.len() != entries {
            let (value, rows) = (format!("{entries} entries"), filled.len());
            return Err(Error::invalid("sampled", value, format!("one for each of {rows} rows")));
        }
        Ok(())
    }

    /// Takes what the oldest step in flight has sampled: a token for each row that emits, `None` for a chunk in the
    /// middle of a prompt. Of a request that is gone, or was set back since, nothing is looked at.
    pub fn accept(&mut self, sampled: &[Option<u32>]) -> Result<(), Error> {
        self.check_due(sampled.len())?;
        let filled = self.in_flight.front().expect("a step is due");
        for (at, (&Filled { row, turn, planned }, &token)) in filled.iter().zip(sampled).enumerate() {
            if self.requests.get(row).is_some_and(|request| request.turn == turn) {
                self.check_sampled(planned, token).map_err(|fault| Error::Row { at, fault })?;
            }
        }
        let filled = self.in_flight.pop_front().expect("a step is due");
        for (Filled { row, turn, planned }, &token) in filled.into_iter().zip(sampled) {
            let living = self.requests.get_mut(row).filter(|request| request.turn == turn);
            if let (Some(request), Some(token)) = (living, token) {
                request.learn(planned.end, token);
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
