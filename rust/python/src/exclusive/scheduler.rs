//! `BucketScheduler`: its state. Its Python methods are in `methods`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use neuron_sched_core::decide::Step as CoreStep;
use neuron_sched_core::exclusive::ExclusiveScheduler;
use neuron_sched_core::request::Row;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::batch_ids::BatchIds;
use crate::config::NeuronConfig;
use crate::guard::Guarded;

/// The core and the request ids of its rows. No Python code may run while it is locked; creating a Python container
/// could run some, because it may start a garbage collection.
pub(super) struct NamedCore {
    pub(super) core: ExclusiveScheduler,
    /// Request ids by row index.
    pub(super) ids: Vec<Option<Py<PyString>>>,
    pub(super) rows: HashMap<String, Row>,
}

impl NamedCore {
    /// Return the id of a row.
    pub(super) fn id(&self, py: Python<'_>, row: Row) -> Py<PyString> {
        self.ids[row.index()].as_ref().expect("a live row has an id").clone_ref(py)
    }

    /// Return the ids of rows.
    pub(super) fn ids(&self, py: Python<'_>, rows: &[Row]) -> Vec<Py<PyString>> {
        rows.iter().map(|&row| self.id(py, row)).collect()
    }

    /// Remove the ids of the ended requests that a completed step has reported. They are moved to `removed`, which the
    /// caller drops after unlocking.
    pub(super) fn remove_reported(&mut self, py: Python<'_>, removed: &mut Vec<Py<PyString>>) -> PyResult<()> {
        for &row in self.core.reported() {
            if let Some(id) = self.ids[row.index()].take() {
                let text = id.bind(py).to_str()?;
                // A new request may have the same id.
                if self.rows.get(text) == Some(&row) {
                    self.rows.remove(text);
                }
                removed.push(id);
            }
        }
        Ok(())
    }
}

/// Continuous-batching scheduler for steps that are all prefill or all decode, padded to a compiled size.
///
/// Methods may be called from several threads.
#[pyclass(frozen, weakref, module = "neuron_sched")]
pub(crate) struct BucketScheduler {
    pub(super) named: Guarded<NamedCore>,
    /// The ids of the last step, reused while the rows stay the same.
    pub(super) last_ids: Mutex<Option<Arc<BatchIds>>>,
    /// The configuration of the scheduler.
    #[pyo3(get)]
    pub(crate) config: Py<NeuronConfig>,
}

impl BucketScheduler {
    /// Return the KV blocks of a row as of the planning of `step`, or `None` if the step is too old.
    pub(crate) fn step_blocks(&self, step: &CoreStep, at: usize) -> PyResult<Option<Vec<u32>>> {
        self.named.with(|named| named.core.step_blocks(step, at).map(<[u32]>::to_vec))
    }

    /// Call `f` with the core. `f` must not run Python code.
    pub(crate) fn read<T>(&self, f: impl FnOnce(&ExclusiveScheduler) -> T) -> PyResult<T> {
        self.named.with(|named| f(&named.core))
    }

    /// Return the ids of the last step.
    pub(super) fn last_ids(&self) -> Option<Arc<BatchIds>> {
        self.last_ids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
