//! The Python methods of `Scheduler`.

use std::sync::Arc;

use neuron_sched_core::error::Error;
use neuron_sched_core::mixed::MixedScheduler;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::req::Req;
use super::request_table::{Entry, MissingTuple, PlanDraft, PlanLists, RequestTable};
use super::requests::Requests;
use super::scheduler::{Queue, Scheduler};
use crate::convert::{count, display};
use crate::error::to_py;
use crate::guard::Guarded;

/// The plan of `schedule`, read while the core is locked.
enum Drafted {
    /// The list of the previous plan, which is identical.
    Same(Py<PyList>),
    New(PlanDraft),
}

/// The result of `complete`, read while the core is locked.
enum Completed {
    /// The rids of the previous completion, which are identical.
    Same(Py<PyList>),
    New(Emission),
}

/// The rids that emitted a token, and the objects to drop while nothing is locked.
struct Emission {
    rids: Vec<Py<PyAny>>,
    finished: Vec<Entry>,
    /// Whether the next completion of this plan emits the same rids.
    steady: bool,
    outdated: Option<PlanLists>,
}

fn not_due() -> Error {
    Error::NotDue("plan: not due: expected the list of the last schedule(), unchanged and not completed yet")
}

#[pymethods]
impl Scheduler {
    #[new]
    fn new(
        token_budget: &Bound<'_, PyAny>,
        max_seqs: &Bound<'_, PyAny>,
        kv_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = token_budget.py();
        let core = MixedScheduler::new(
            count("token_budget", token_budget, 1)?,
            count("max_seqs", max_seqs, 1)?,
            count("kv_tokens", kv_tokens, 1)?,
        );
        let core = core.map_err(|error| to_py(&error))?;
        Ok(Self {
            core: Arc::new(Guarded::new(core)),
            table: Guarded::new(RequestTable::default()),
            live: PyDict::new(py).unbind(),
        })
    }

    /// Queue a request.
    ///
    /// A cancelled request may be added again; it resumes from its counters. Raise `ValueError` and change nothing if
    /// the request can never fit (`prompt_len + max_new > kv_tokens`), if it is live in this or another scheduler, if a
    /// live request of this scheduler has the same rid, or if it has generated all its outputs.
    fn add(&self, req: &Bound<'_, PyAny>) -> PyResult<()> {
        let Ok(req) = req.cast::<Req>() else {
            return Err(PyTypeError::new_err(format!("req: {}: expected a Req", display(req))));
        };
        let Some(request) = req.get().claim(&self.core) else {
            return Err(PyValueError::new_err(format!(
                "req: {}: expected a Req that is not already live",
                display(req)
            )));
        };
        let added = self.claim_rid(req).and_then(|()| {
            let added = self.with_both(|table, core| {
                let row = core.add(request)?;
                req.get().set_live(&self.core, row);
                table.insert(row, req.clone().unbind());
                Ok(())
            });
            added.and_then(|added| added.map_err(|error| to_py(&error))).inspect_err(|_| self.free_rid(req))
        });
        added.inspect_err(|_| req.get().unclaim())
    }

    /// Plan the next step: return the scheduled requests with their token counts.
    ///
    /// Requests are admitted here; counters change in `complete`. The next call voids a plan that is not completed; the
    /// requests that it admitted stay admitted. The list is a new one.
    fn schedule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let drafted = self.with_both(|table, core| {
            core.schedule();
            let revision = core.revision();
            match table.lists(revision) {
                Some(lists) => Drafted::Same(lists.plan.clone_ref(py)),
                None => Drafted::New(table.draft(py, revision, core.plan().unwrap_or_default())),
            }
        });
        let plan = match drafted? {
            Drafted::Same(plan) => plan.into_bound(py),
            Drafted::New(draft) => self.write_plan(py, draft)?,
        };
        Ok(copied(&plan))
    }

    /// Complete the plan of the last `schedule`, and return the rids that emitted a token, in order of the plan.
    ///
    /// A decode emits a token, and so does the chunk that ends a prompt; an earlier chunk does not. A request that has
    /// generated `max_new` tokens leaves `running` and releases its reservation. Items of requests that were cancelled
    /// since `schedule` are skipped.
    ///
    /// `plan` is the list of the last `schedule` or an equal one, and can be completed once. Raise `ValueError` and
    /// change nothing for any other list, and `TypeError` for a value that is not a list.
    fn complete<'py>(&self, plan: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = plan.py();
        let Ok(plan) = plan.cast::<PyList>() else {
            return Err(PyTypeError::new_err(format!("plan: {}: expected a list", display(plan))));
        };
        let due = self.with_both(|table, core| {
            let lists = core.plan().and_then(|_| table.lists(core.revision()))?;
            Some((lists.revision, lists.plan.clone_ref(py)))
        });
        let Some((revision, expected)) = due? else { return Err(to_py(&not_due())) };
        if !plan.eq(expected)? {
            return Err(to_py(&not_due()));
        }
        let completed = self.with_both(|table, core| apply(py, table, core, revision));
        match completed?.map_err(|error| to_py(&error))? {
            Completed::Same(rids) => Ok(copied(rids.bind(py))),
            Completed::New(emission) => self.write_rids(py, revision, emission),
        }
    }

    /// Cancel a live request and release its reservation. Return `False` if no live request has the rid.
    fn cancel(&self, rid: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = rid.py();
        let Some(req) = self.live.bind(py).get_item(rid)? else { return Ok(false) };
        let req = req.cast::<Req>()?;
        let ended = self.with_both(|table, core| {
            let row = req.get().row(&self.core)?;
            req.get().set_detached(core.cancel(row)?);
            let outdated = if core.plan().is_none() && !core.is_steady() { table.take_lists() } else { None };
            Some((table.remove(row), outdated))
        })?;
        if ended.is_some() {
            self.free_rid(req);
        }
        Ok(ended.is_some())
    }

    /// Waiting requests, first come first served.
    #[getter]
    fn waiting(slf: &Bound<'_, Self>) -> Requests {
        Requests::new(slf.clone().unbind(), Queue::Waiting)
    }

    /// Running requests, oldest first.
    #[getter]
    fn running(slf: &Bound<'_, Self>) -> Requests {
        Requests::new(slf.clone().unbind(), Queue::Running)
    }

    /// Number of reserved KV tokens: the sum of `prompt_len + max_new` over `running`.
    #[getter]
    fn reserved(&self) -> PyResult<u64> {
        self.core.with(|core| core.reserved())
    }

    /// Check the invariants of the scheduler. Raise `RuntimeError` if one is violated, which is always a bug.
    ///
    /// Takes time proportional to the number of live requests.
    fn check(&self) -> PyResult<()> {
        self.core.with(|core| core.check())?.map_err(|error| to_py(&error))
    }

    fn __repr__(&self) -> PyResult<String> {
        let (waiting, running, reserved) =
            self.core.with(|core| (core.num_waiting(), core.num_running(), core.reserved()))?;
        Ok(format!("<Scheduler: {waiting} waiting, {running} running, {reserved} tokens reserved>"))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.live)?;
        self.table.try_with(|table| table.traverse(&visit)).unwrap_or(Ok(()))
    }

    fn __clear__(&self) {
        drop(self.table.try_with(std::mem::take));
    }
}

/// Return a copy, which the caller may modify.
fn copied<'py>(list: &Bound<'py, PyList>) -> Bound<'py, PyList> {
    list.get_slice(0, list.len())
}

/// Complete the plan of a revision, and mark the finished requests.
fn apply(
    py: Python<'_>,
    table: &mut RequestTable,
    core: &mut MixedScheduler,
    revision: u64,
) -> Result<Completed, Error> {
    if core.revision() != revision {
        return Err(not_due());
    }
    let steady = core.is_steady();
    let emitted = core.complete()?;
    if steady && let Some(rids) = table.lists(revision).and_then(|lists| lists.rids.as_ref()) {
        return Ok(Completed::Same(rids.clone_ref(py)));
    }
    let rids = Vec::with_capacity(emitted.len());
    let mut emission = Emission { rids, finished: Vec::new(), steady, outdated: None };
    for emitted in emitted {
        let Some(req) = table.req(emitted.row) else { continue };
        emission.rids.push(req.get().rid().clone_ref(py));
        if emitted.finished {
            req.get().set_finished();
            emission.finished.extend(table.remove(emitted.row));
        }
    }
    if !steady {
        emission.outdated = table.take_lists();
    }
    Ok(Completed::New(emission))
}

impl Scheduler {
    /// Create the list of a new plan, and store it with the tuples that later plans share.
    fn write_plan<'py>(&self, py: Python<'py>, draft: PlanDraft) -> PyResult<Bound<'py, PyList>> {
        let PlanDraft { revision, mut tuples, missing } = draft;
        let mut decodes = Vec::new();
        for MissingTuple { position, row, req, tokens } in missing {
            let tuple = (req, tokens).into_pyobject(py)?.unbind();
            if tokens == 1 {
                decodes.push((row, tuple.clone_ref(py)));
            }
            tuples[position] = Some(tuple);
        }
        let plan = PyList::new(py, tuples)?;
        let lists = PlanLists { revision, plan: plan.clone().unbind(), rids: None };
        let replaced = self.with_both(|table, core| {
            let decodes: Vec<_> = decodes.into_iter().map(|(row, decode)| table.store_decode(row, decode)).collect();
            (decodes, if core.revision() == revision { table.store_lists(lists) } else { Some(lists) })
        });
        drop(replaced?);
        Ok(plan)
    }

    /// Create the list of rids, and store it if the next completion of the plan emits the same rids.
    fn write_rids<'py>(&self, py: Python<'py>, revision: u64, emission: Emission) -> PyResult<Bound<'py, PyList>> {
        let Emission { rids, finished, steady, outdated } = emission;
        drop(outdated);
        for entry in finished {
            self.free_rid(entry.into_req().bind(py));
        }
        let rids = PyList::new(py, rids)?;
        if !steady {
            return Ok(rids);
        }
        let replaced = self
            .table
            .with(|table| table.lists_mut(revision).and_then(|lists| lists.rids.replace(rids.clone().unbind())));
        drop(replaced?);
        Ok(copied(&rids))
    }
}
