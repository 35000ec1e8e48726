//! `Scheduler`: its state, and the look-ups in it. Its Python methods are in `methods`.

use neuron_sched_core::mixed::MixedScheduler;
use neuron_sched_core::request::Row;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::req::{Core, Req};
use super::roster::Roster;
use crate::convert::shown;
use crate::guard::Guarded;

/// One of the two queues.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    Waiting,
    Running,
}

/// Continuous batching under a token budget, for hardware that may mix prefill and decode in one batch.
///
/// A step spends at most `token_budget` tokens, in this order, each oldest first:
///
/// 1. one token for every running request whose prompt is computed (a decode);
/// 2. the rest of any running request's prompt, as much as the budget leaves (a chunk);
/// 3. waiting requests in order, while budget is left, fewer than `max_seqs` run, and the KV cache has room for
///    `prompt_len + max_new` tokens besides what is reserved. The head of the queue is never passed over.
#[pyclass(frozen, weakref, module = "neuron_sched")]
pub(crate) struct Scheduler {
    /// Locked inside the roster where both are needed.
    pub(super) core: Core,
    pub(super) roster: Guarded<Roster>,
    /// The live requests by rid. An entry left behind by a rid that could not be compared when its request
    /// ended is known by its `Req`, which does not belong here any more.
    pub(super) live: Py<PyDict>,
}

impl Scheduler {
    /// Calls `f` with roster and core, which must not call into Python.
    pub(super) fn with_both<R>(&self, f: impl FnOnce(&mut Roster, &mut MixedScheduler) -> R) -> PyResult<R> {
        self.roster.with(|roster| self.core.with(|core| f(roster, core)))?
    }

    /// Notes the rid as live; an error when it is already.
    pub(super) fn claim_rid(&self, req: &Bound<'_, Req>) -> PyResult<()> {
        let live = self.live.bind(req.py());
        let rid = req.get().rid().bind(req.py());
        loop {
            // One look-up that also inserts: whatever the rid's own comparison does, one request gets in.
            let holder = live.call_method1("setdefault", (rid, req))?;
            if holder.is(req) {
                return Ok(());
            }
            let holder = holder.cast::<Req>()?;
            if holder.get().belongs_to(&self.core) {
                return Err(PyValueError::new_err(format!(
                    "rid: {}: expected one that is not already live",
                    shown(rid)
                )));
            }
            live.del_item(rid)?;
        }
    }

    /// Forgets the rid of a request that ended. The end itself stands even if the rid's own comparison fails.
    pub(super) fn free_rid(&self, req: &Bound<'_, Req>) {
        let live = self.live.bind(req.py());
        let rid = req.get().rid();
        let freed = live.get_item(rid).and_then(|holder| match holder {
            Some(holder) if holder.is(req) => live.del_item(rid),
            _ => Ok(()),
        });
        if let Err(error) = freed {
            error.write_unraisable(req.py(), Some(req));
        }
    }

    /// Those in a queue, oldest first.
    pub(super) fn queued(&self, py: Python<'_>, queue: Queue) -> PyResult<Vec<Py<Req>>> {
        self.with_both(|roster, core| {
            let req = |row: Row| Some(roster.req(row)?.clone_ref(py));
            match queue {
                Queue::Waiting => core.waiting().filter_map(req).collect(),
                Queue::Running => core.running().filter_map(req).collect(),
            }
        })
    }

    /// The one at `index`, counted from the newest if it is negative.
    pub(super) fn queued_at(&self, py: Python<'_>, queue: Queue, index: isize) -> PyResult<Option<Py<Req>>> {
        self.with_both(|roster, core| {
            let len = num_queued(core, queue);
            let position = if index < 0 { len.checked_add_signed(index)? } else { index.unsigned_abs() };
            let row = match queue {
                Queue::Waiting => core.waiting_at(position),
                Queue::Running => core.running_at(position),
            };
            Some(roster.req(row?)?.clone_ref(py))
        })
    }

    pub(super) fn num_queued(&self, queue: Queue) -> PyResult<usize> {
        self.core.with(|core| num_queued(core, queue))
    }

    pub(super) fn is_queued(&self, queue: Queue, req: &Req) -> PyResult<bool> {
        let Some(row) = req.row(&self.core) else { return Ok(false) };
        self.core.with(|core| core.is_running(row).is_some_and(|running| running == (queue == Queue::Running)))
    }
}

fn num_queued(core: &MixedScheduler, queue: Queue) -> usize {
    match queue {
        Queue::Waiting => core.num_waiting(),
        Queue::Running => core.num_running(),
    }
}
