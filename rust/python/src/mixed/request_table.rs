//! `RequestTable`: the `Req` of each row, and the Python lists that are returned again while they stay valid.

use neuron_sched_core::mixed::Planned;
use neuron_sched_core::request::Row;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::req::Req;

/// The Python objects of the live requests and of the current plan.
///
/// The table is locked only to look objects up and to store them. Creating or dropping an object may run Python code,
/// so it happens while the table is unlocked.
#[derive(Default)]
pub(super) struct RequestTable {
    /// Live requests by [`Row::index`].
    entries: Vec<Option<Entry>>,
    lists: Option<PlanLists>,
}

/// A live request.
pub(super) struct Entry {
    row: Row,
    req: Py<Req>,
    /// `(req, 1)`, the item of the request in every plan while it decodes. Created for the first such plan.
    decode: Option<Py<PyTuple>>,
}

/// The lists of one plan. They never change and are never returned: callers get copies.
pub(super) struct PlanLists {
    /// Revision of the core's plan.
    pub(super) revision: u64,
    pub(super) plan: Py<PyList>,
    /// The rids in order of the plan. Created by the first completion in which every request of the plan emits.
    pub(super) rids: Option<Py<PyList>>,
}

/// The items of a new plan, some of which are still to be created.
pub(super) struct PlanDraft {
    pub(super) revision: u64,
    /// Items in order of the plan; `None` if the item is in `missing`.
    pub(super) tuples: Vec<Option<Py<PyTuple>>>,
    pub(super) missing: Vec<MissingTuple>,
}

/// The contents of an item that is still to be created.
pub(super) struct MissingTuple {
    /// Position in the plan.
    pub(super) position: usize,
    pub(super) row: Row,
    pub(super) req: Py<Req>,
    pub(super) tokens: u64,
}

impl RequestTable {
    /// Add a live request.
    pub(super) fn insert(&mut self, row: Row, req: Py<Req>) {
        if self.entries.len() <= row.index() {
            self.entries.resize_with(row.index() + 1, || None);
        }
        self.entries[row.index()] = Some(Entry { row, req, decode: None });
    }

    /// Remove a request, and return its objects for the caller to drop while the table is unlocked.
    pub(super) fn remove(&mut self, row: Row) -> Option<Entry> {
        self.entries.get_mut(row.index())?.take_if(|entry| entry.row == row)
    }

    /// Return the request of a row.
    pub(super) fn req(&self, row: Row) -> Option<&Py<Req>> {
        self.entries.get(row.index())?.as_ref().filter(|entry| entry.row == row).map(|entry| &entry.req)
    }

    /// Return the items of a plan that exist, and the contents of the others.
    pub(super) fn draft(&self, py: Python<'_>, revision: u64, plan: &[Planned]) -> PlanDraft {
        let mut draft = PlanDraft { revision, tuples: Vec::with_capacity(plan.len()), missing: Vec::new() };
        for &Planned { row, tokens } in plan {
            let Some(Some(Entry { req, decode, .. })) = self.entries.get(row.index()) else { continue };
            let known = decode.as_ref().filter(|_| tokens == 1);
            if known.is_none() {
                let position = draft.tuples.len();
                draft.missing.push(MissingTuple { position, row, req: req.clone_ref(py), tokens });
            }
            draft.tuples.push(known.map(|tuple| tuple.clone_ref(py)));
        }
        draft
    }

    /// Store `(req, 1)` for later plans, and return the tuple that the caller has to drop.
    pub(super) fn store_decode(&mut self, row: Row, decode: Py<PyTuple>) -> Option<Py<PyTuple>> {
        match self.entries.get_mut(row.index()) {
            Some(Some(entry)) if entry.row == row => entry.decode.replace(decode),
            _ => Some(decode),
        }
    }

    /// Return the lists of a plan, if they are stored.
    pub(super) fn lists(&self, revision: u64) -> Option<&PlanLists> {
        self.lists.as_ref().filter(|lists| lists.revision == revision)
    }

    /// Return the lists of a plan, if they are stored.
    pub(super) fn lists_mut(&mut self, revision: u64) -> Option<&mut PlanLists> {
        self.lists.as_mut().filter(|lists| lists.revision == revision)
    }

    /// Store the lists of the current plan, and return the lists that they replace.
    pub(super) fn store_lists(&mut self, lists: PlanLists) -> Option<PlanLists> {
        self.lists.replace(lists)
    }

    /// Remove the lists of a plan that will not be planned again.
    pub(super) fn take_lists(&mut self) -> Option<PlanLists> {
        self.lists.take()
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        for entry in self.entries.iter().flatten() {
            visit.call(&entry.req)?;
            visit.call(&entry.decode)?;
        }
        if let Some(lists) = &self.lists {
            visit.call(&lists.plan)?;
            visit.call(&lists.rids)?;
        }
        Ok(())
    }
}

impl Entry {
    /// Return the request.
    pub(super) fn into_req(self) -> Py<Req> {
        self.req
    }
}
