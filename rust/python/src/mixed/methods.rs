//! The Python methods of `Scheduler`.

use std::sync::Arc;

use neuron_sched_core::error::Error;
use neuron_sched_core::mixed::MixedScheduler;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::req::Req;
use super::requests::Requests;
use super::roster::{Draft, Lists, Missing, Roster, Seat};
use super::scheduler::{Queue, Scheduler};
use crate::convert::{count, shown};
use crate::error::to_py;
use crate::guard::Guarded;

/// What `schedule` found.
enum Drafted {
    /// The plan of last time.
    Same(Py<PyList>),
    New(Draft),
}

/// What `complete` found.
enum Completed {
    /// The rids of last time.
    Same(Py<PyList>),
    New(Emission),
}

struct Emission {
    rids: Vec<Py<PyAny>>,
    ended: Vec<Seat>,
    /// Whether the next completion of this plan emits the same.
    steady: bool,
    outdated: Option<Lists>,
}

fn not_due() -> Error {
    Error::NotDue("plan: expected the plan of the last schedule(), unchanged, and once")
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
            roster: Guarded::new(Roster::default()),
            live: PyDict::new(py).unbind(),
        })
    }

    /// Queues a request.
    ///
    /// `ValueError`, and nothing is changed, if it could never fit (`prompt_len + max_new > kv_tokens`), if it is
    /// live in this or another scheduler, if its rid is live in this one, or if it has generated all its outputs.
    fn add(&self, req: &Bound<'_, PyAny>) -> PyResult<()> {
        let Ok(req) = req.cast::<Req>() else {
            return Err(PyTypeError::new_err(format!("req: {}: expected a Req", shown(req))));
        };
        let Some(request) = req.get().join(&self.core) else {
            return Err(PyValueError::new_err(format!("req: {}: expected a Req that is not already live", shown(req))));
        };
        let added = self.claim_rid(req).and_then(|()| {
            let added = self.with_both(|roster, core| {
                let row = core.add(request)?;
                req.get().enter(&self.core, row);
                roster.seat(row, req.clone().unbind());
                Ok(())
            });
            added.and_then(|added| added.map_err(|error| to_py(&error))).inspect_err(|_| self.free_rid(req))
        });
        added.inspect_err(|_| req.get().stay_out())
    }

    /// Plans the next step: who runs, and how many tokens of each.
    ///
    /// Admits at once; counters move in `complete`. A plan that was not completed is void once another one is made;
    /// whom it admitted stays admitted.
    fn schedule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let drafted = self.with_both(|roster, core| {
            core.schedule();
            let revision = core.revision();
            match roster.lists(revision) {
                Some(lists) => Drafted::Same(lists.plan.clone_ref(py)),
                None => Drafted::New(roster.draft(py, revision, core.plan().unwrap_or_default())),
            }
        });
        let plan = match drafted? {
            Drafted::Same(plan) => plan.into_bound(py),
            Drafted::New(draft) => self.write_plan(py, draft)?,
        };
        Ok(copied(&plan))
    }

    /// Applies the plan of the last `schedule` once it has run; returns the rids that emitted a token, in its
    /// order.
    fn complete<'py>(&self, plan: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = plan.py();
        let Ok(plan) = plan.cast::<PyList>() else {
            return Err(PyTypeError::new_err(format!("plan: {}: expected a list", shown(plan))));
        };
        let due = self.with_both(|roster, core| {
            let lists = core.plan().and_then(|_| roster.lists(core.revision()))?;
            Some((lists.revision, lists.plan.clone_ref(py)))
        });
        let Some((revision, expected)) = due? else { return Err(to_py(&not_due())) };
        if !plan.eq(expected)? {
            return Err(to_py(&not_due()));
        }
        let completed = self.with_both(|roster, core| apply(py, roster, core, revision));
        match completed?.map_err(|error| to_py(&error))? {
            Completed::Same(rids) => Ok(copied(rids.bind(py))),
            Completed::New(emission) => self.write_rids(py, revision, emission),
        }
    }

    /// Ends the live request of that rid, waiting or running, and frees its reservation at once.
    ///
    /// False when no live request bears it.
    fn cancel(&self, rid: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = rid.py();
        let Some(req) = self.live.bind(py).get_item(rid)? else { return Ok(false) };
        let req = req.cast::<Req>()?;
        let ended = self.with_both(|roster, core| {
            let row = req.get().row(&self.core)?;
            req.get().leave(core.cancel(row)?);
            let outdated = if core.plan().is_none() && !core.is_steady() { roster.take_lists() } else { None };
            Some((roster.unseat(row), outdated))
        })?;
        if ended.is_some() {
            self.free_rid(req);
        }
        Ok(ended.is_some())
    }

    /// The requests not admitted yet, first come first served.
    #[getter]
    fn waiting(slf: &Bound<'_, Self>) -> Requests {
        Requests::new(slf.clone().unbind(), Queue::Waiting)
    }

    /// The admitted requests, oldest first.
    #[getter]
    fn running(slf: &Bound<'_, Self>) -> Requests {
        Requests::new(slf.clone().unbind(), Queue::Running)
    }

    /// KV tokens reserved now: the sum of `prompt_len + max_new` over `running`.
    #[getter]
    fn reserved(&self) -> PyResult<u64> {
        self.core.with(|core| core.reserved())
    }

    /// Verifies the conservation laws; `RuntimeError` on a fault of the scheduler itself.
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
        self.roster.try_with(|roster| roster.traverse(&visit)).unwrap_or(Ok(()))
    }

    fn __clear__(&self) {
        drop(self.roster.try_with(std::mem::take));
    }
}

/// A list that its receiver may do with as he likes.
fn copied<'py>(list: &Bound<'py, PyList>) -> Bound<'py, PyList> {
    list.get_slice(0, list.len())
}

/// Completes the plan of that revision and notes in the requests what has ended.
fn apply(py: Python<'_>, roster: &mut Roster, core: &mut MixedScheduler, revision: u64) -> Result<Completed, Error> {
    if core.revision() != revision {
        return Err(not_due());
    }
    let steady = core.is_steady();
    let emitted = core.complete()?;
    if steady && let Some(rids) = roster.lists(revision).and_then(|lists| lists.rids.as_ref()) {
        return Ok(Completed::Same(rids.clone_ref(py)));
    }
    let rids = Vec::with_capacity(emitted.len());
    let mut emission = Emission { rids, ended: Vec::new(), steady, outdated: None };
    for emitted in emitted {
        let Some(req) = roster.req(emitted.row) else { continue };
        emission.rids.push(req.get().rid().clone_ref(py));
        if emitted.finished {
            req.get().finish();
            emission.ended.extend(roster.unseat(emitted.row));
        }
    }
    if !steady {
        emission.outdated = roster.take_lists();
    }
    Ok(Completed::New(emission))
}

impl Scheduler {
    /// Makes the list of a new plan and keeps it, with the tuples that later plans share.
    fn write_plan<'py>(&self, py: Python<'py>, draft: Draft) -> PyResult<Bound<'py, PyList>> {
        let Draft { revision, mut tuples, missing } = draft;
        let mut decodes = Vec::new();
        for Missing { position, row, req, tokens } in missing {
            let tuple = (req, tokens).into_pyobject(py)?.unbind();
            if tokens == 1 {
                decodes.push((row, tuple.clone_ref(py)));
            }
            tuples[position] = Some(tuple);
        }
        let plan = PyList::new(py, tuples)?;
        let lists = Lists { revision, plan: plan.clone().unbind(), rids: None };
        let replaced = self.with_both(|roster, core| {
            let decodes: Vec<_> = decodes.into_iter().map(|(row, decode)| roster.keep_decode(row, decode)).collect();
            (decodes, if core.revision() == revision { roster.keep_lists(lists) } else { Some(lists) })
        });
        drop(replaced?);
        Ok(plan)
    }

    /// Makes the list of rids, and keeps it if it will be wanted again.
    fn write_rids<'py>(&self, py: Python<'py>, revision: u64, emission: Emission) -> PyResult<Bound<'py, PyList>> {
        let Emission { rids, ended, steady, outdated } = emission;
        drop(outdated);
        for seat in ended {
            self.free_rid(seat.into_req().bind(py));
        }
        let rids = PyList::new(py, rids)?;
        if !steady {
            return Ok(rids);
        }
        let replaced = self
            .roster
            .with(|roster| roster.lists_mut(revision).and_then(|lists| lists.rids.replace(rids.clone().unbind())));
        drop(replaced?);
        Ok(copied(&rids))
    }
}
