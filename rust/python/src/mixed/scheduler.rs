//! `Scheduler`: its state, and the look-ups in it. Its Python methods are in `methods`.

use neuron_sched_core::mixed::MixedScheduler;
use neuron_sched_core::request::Row;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::req::{Core, Req};
use super::request_table::RequestTable;
use crate::convert::display;
use crate::guard::Guarded;

/// The waiting or the running requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    Waiting,
    Running,
}

/// Continuous-batching scheduler with a token budget, for hardware that can mix prefill and decode in one step.
///
/// A step has at most `token_budget` tokens. They are assigned in this order, oldest request first:
///
/// 1. one token to every running request with a computed prompt (a decode);
/// 2. the remaining prompt tokens of running requests, as far as the budget allows (a chunk);
/// 3. prompt tokens of waiting requests, in queue order. A request is admitted if budget is left, fewer than `max_seqs`
///    requests run, and `prompt_len + max_new` tokens fit the unreserved part of `kv_tokens`. If the head of the queue
///    does not fit, no later request is admitted.
///
/// Ranges and errors of the arguments are those of `Req`. Methods may be called from several threads.
#[pyclass(frozen, weakref, module = "neuron_sched")]
pub(crate) struct Scheduler {
    /// Lock order: `table` before `core`.
    pub(super) core: Core,
    pub(super) table: Guarded<RequestTable>,
    /// Live requests by rid. An entry is stale if comparing the rid raised when its request ended; the `Req` of a stale
    /// entry does not belong to this scheduler.
    pub(super) live: Py<PyDict>,
}

impl Scheduler {
    /// Call `f` with the table and the core. `f` must not run Python code.
    pub(super) fn with_both<R>(&self, f: impl FnOnce(&mut RequestTable, &mut MixedScheduler) -> R) -> PyResult<R> {
        self.table.with(|table| self.core.with(|core| f(table, core)))?
    }

    /// Add the rid to the live requests. An error if a live request has it.
    pub(super) fn claim_rid(&self, req: &Bound<'_, Req>) -> PyResult<()> {
        let live = self.live.bind(req.py());
        let rid = req.get().rid().bind(req.py());
        loop {
            // `setdefault` looks up and inserts at once: comparing the rid may run Python code that adds requests.
            let found = live.call_method1("setdefault", (rid, req))?;
            if found.is(req) {
                return Ok(());
            }
            let found = found.cast::<Req>()?;
            if found.get().belongs_to(&self.core) {
                return Err(PyValueError::new_err(format!(
                    "rid: {}: expected a rid that is not already live",
                    display(rid)
                )));
            }
            live.del_item(rid)?;
        }
    }

    /// Remove the rid of an ended request. If comparing the rid raises, the error is reported as unraisable, and the
    /// request has ended nevertheless.
    pub(super) fn free_rid(&self, req: &Bound<'_, Req>) {
        let live = self.live.bind(req.py());
        let rid = req.get().rid();
        let removed = live.get_item(rid).and_then(|found| match found {
            Some(found) if found.is(req) => live.del_item(rid),
            _ => Ok(()),
        });
        if let Err(error) = removed {
            error.write_unraisable(req.py(), Some(req));
        }
    }

    /// Return the requests of a queue, oldest first.
    pub(super) fn queued(&self, py: Python<'_>, queue: Queue) -> PyResult<Vec<Py<Req>>> {
        self.with_both(|table, core| {
            let req = |row: Row| Some(table.req(row)?.clone_ref(py));
            match queue {
                Queue::Waiting => core.waiting().filter_map(req).collect(),
                Queue::Running => core.running().filter_map(req).collect(),
            }
        })
    }

    /// Return the request at `index`; a negative index counts from the newest request.
    pub(super) fn queued_at(&self, py: Python<'_>, queue: Queue, index: isize) -> PyResult<Option<Py<Req>>> {
        self.with_both(|table, core| {
            let len = num_queued(core, queue);
            let position = if index < 0 { len.checked_add_signed(index)? } else { index.unsigned_abs() };
            let row = match queue {
                Queue::Waiting => core.waiting_at(position),
                Queue::Running => core.running_at(position),
            };
            Some(table.req(row?)?.clone_ref(py))
        })
    }

    /// Return the number of requests in a queue.
    pub(super) fn num_queued(&self, queue: Queue) -> PyResult<usize> {
        self.core.with(|core| num_queued(core, queue))
    }

    /// Return whether a request is in a queue.
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
