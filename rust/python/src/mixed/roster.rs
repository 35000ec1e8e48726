//! Which `Req` stands behind which row, and the lists that are given out again while they stay right.

use neuron_sched_core::mixed::Planned;
use neuron_sched_core::request::Row;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::req::Req;

/// Python objects beside the core. It is locked only to look things up and to note them: what creates or
/// drops an object, which may run any Python code, happens outside.
#[derive(Default)]
pub(super) struct Roster {
    /// By [`Row::index`].
    seats: Vec<Option<Seat>>,
    lists: Option<Lists>,
}

/// A live request.
pub(super) struct Seat {
    row: Row,
    req: Py<Req>,
    /// `(req, 1)`, its entry in every plan while it decodes, made with the first.
    decode: Option<Py<PyTuple>>,
}

/// The lists of one plan. They are never changed and never leave: callers get copies.
pub(super) struct Lists {
    /// Of the core's plan.
    pub(super) revision: u64,
    pub(super) plan: Py<PyList>,
    /// The rids in order of the plan, made by the first completion in which everybody emits.
    pub(super) rids: Option<Py<PyList>>,
}

/// A plan on its way to become a list of tuples.
pub(super) struct Draft {
    pub(super) revision: u64,
    /// In order of the plan; `None` where the tuple is still to be made.
    pub(super) tuples: Vec<Option<Py<PyTuple>>>,
    pub(super) missing: Vec<Missing>,
}

/// An entry whose tuple is still to be made.
pub(super) struct Missing {
    /// Where it belongs among the tuples.
    pub(super) position: usize,
    pub(super) row: Row,
    pub(super) req: Py<Req>,
    pub(super) tokens: u64,
}

impl Roster {
    pub(super) fn seat(&mut self, row: Row, req: Py<Req>) {
        if self.seats.len() <= row.index() {
            self.seats.resize_with(row.index() + 1, || None);
        }
        self.seats[row.index()] = Some(Seat { row, req, decode: None });
    }

    pub(super) fn unseat(&mut self, row: Row) -> Option<Seat> {
        self.seats.get_mut(row.index())?.take_if(|seat| seat.row == row)
    }

    pub(super) fn req(&self, row: Row) -> Option<&Py<Req>> {
        self.seats.get(row.index())?.as_ref().filter(|seat| seat.row == row).map(|seat| &seat.req)
    }

    pub(super) fn draft(&self, py: Python<'_>, revision: u64, plan: &[Planned]) -> Draft {
        let mut draft = Draft { revision, tuples: Vec::with_capacity(plan.len()), missing: Vec::new() };
        for &Planned { row, tokens } in plan {
            let Some(Some(Seat { req, decode, .. })) = self.seats.get(row.index()) else { continue };
            let known = decode.as_ref().filter(|_| tokens == 1);
            if known.is_none() {
                let position = draft.tuples.len();
                draft.missing.push(Missing { position, row, req: req.clone_ref(py), tokens });
            }
            draft.tuples.push(known.map(|tuple| tuple.clone_ref(py)));
        }
        draft
    }

    /// Keeps `(req, 1)` for the plans to come; gives back what it replaces.
    pub(super) fn keep_decode(&mut self, row: Row, decode: Py<PyTuple>) -> Option<Py<PyTuple>> {
        match self.seats.get_mut(row.index()) {
            Some(Some(seat)) if seat.row == row => seat.decode.replace(decode),
            _ => Some(decode),
        }
    }

    pub(super) fn lists(&self, revision: u64) -> Option<&Lists> {
        self.lists.as_ref().filter(|lists| lists.revision == revision)
    }

    pub(super) fn lists_mut(&mut self, revision: u64) -> Option<&mut Lists> {
        self.lists.as_mut().filter(|lists| lists.revision == revision)
    }

    /// Keeps the lists of the present plan; gives back those they replace.
    pub(super) fn keep_lists(&mut self, lists: Lists) -> Option<Lists> {
        self.lists.replace(lists)
    }

    /// Gives up the lists of a plan that will not come again.
    pub(super) fn take_lists(&mut self) -> Option<Lists> {
        self.lists.take()
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        for seat in self.seats.iter().flatten() {
            visit.call(&seat.req)?;
            visit.call(&seat.decode)?;
        }
        if let Some(lists) = &self.lists {
            visit.call(&lists.plan)?;
            visit.call(&lists.rids)?;
        }
        Ok(())
    }
}

impl Seat {
    pub(super) fn into_req(self) -> Py<Req> {
        self.req
    }
}
