//! `BucketScheduler`: its state. Its Python methods are in `methods`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use neuron_sched_core::decide::Step as CoreStep;
use neuron_sched_core::exclusive::ExclusiveScheduler;
use neuron_sched_core::request::Row;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::names::Names;
use crate::config::NeuronConfig;
use crate::guard::Guarded;

/// The core and the names of its rows. Nothing that could run Python code is done while it is locked, and
/// making a Python container could: it may start the garbage collector.
pub(super) struct Named {
    pub(super) core: ExclusiveScheduler,
    /// By row index.
    pub(super) ids: Vec<Option<Py<PyString>>>,
    pub(super) rows: HashMap<String, Row>,
}

impl Named {
    pub(super) fn id(&self, py: Python<'_>, row: Row) -> Py<PyString> {
        self.ids[row.index()].as_ref().expect("a live row has a name").clone_ref(py)
    }

    pub(super) fn ids(&self, py: Python<'_>, rows: &[Row]) -> Vec<Py<PyString>> {
        rows.iter().map(|&row| self.id(py, row)).collect()
    }

    /// Forgets the names of requests whose end was delivered; they go to `gone`, to be dropped unlocked.
    pub(super) fn forget_delivered(&mut self, py: Python<'_>, gone: &mut Vec<Py<PyString>>) -> PyResult<()> {
        for &row in self.core.delivered() {
            if let Some(id) = self.ids[row.index()].take() {
                let name = id.bind(py).to_str()?;
                // The id may have been used again since.
                if self.rows.get(name) == Some(&row) {
                    self.rows.remove(name);
                }
                gone.push(id);
            }
        }
        Ok(())
    }
}

/// Continuous batching where a step is all prefill or all decode, padded to a compiled size.
///
/// May be used from several threads.
#[pyclass(frozen, weakref, module = "neuron_sched")]
pub(crate) struct BucketScheduler {
    pub(super) named: Guarded<Named>,
    /// The names of the last step, used again while the rows stay the same.
    pub(super) names: Mutex<Option<Arc<Names>>>,
    /// The configuration that it was made with.
    #[pyo3(get)]
    pub(crate) config: Py<NeuronConfig>,
}

impl BucketScheduler {
    /// The blocks of a row as they were when `step` was planned, if that can still be told.
    pub(crate) fn step_blocks(&self, step: &CoreStep, at: usize) -> PyResult<Option<Vec<u32>>> {
        self.named.with(|named| named.core.step_blocks(step, at).map(<[u32]>::to_vec))
    }

    /// Calls `f` with the core, and so must not run Python code.
    pub(crate) fn read<T>(&self, f: impl FnOnce(&ExclusiveScheduler) -> T) -> PyResult<T> {
        self.named.with(|named| f(&named.core))
    }

    pub(super) fn last_names(&self) -> Option<Arc<Names>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
