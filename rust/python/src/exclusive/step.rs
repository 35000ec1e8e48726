//! `Step`: one planned step. Values that a caller may never read are made when they are read.

use std::sync::Arc;

use neuron_sched_core::decide::Step as CoreStep;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use super::names::Names;
use super::scheduler::BucketScheduler;

/// One planned step: who runs, how many tokens, padded to what. All values are those of its planning.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Step {
    pub(crate) scheduler: Py<BucketScheduler>,
    pub(crate) planned: Arc<CoreStep>,
    pub(crate) names: Arc<Names>,
    pub(crate) finished: Vec<Py<PyString>>,
}

#[pymethods]
impl Step {
    /// `"prefill"`, `"decode"`, or `"idle"` when nobody runs.
    #[getter]
    fn kind(&self) -> &'static str {
        self.planned.kind().name()
    }

    /// Real tokens by request id, in batch order; a new dict each time.
    #[getter]
    fn num_scheduled_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.planned.is_uniform() { self.names.ones(py) } else { self.names.dict(py, |at| self.planned.tokens(at)) }
    }

    /// Padded tokens by request id, in batch order; a new dict each time.
    #[getter]
    fn num_scheduled_tokens_padded<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.planned.is_uniform() { self.names.ones(py) } else { self.names.dict(py, |at| self.planned.padded(at)) }
    }

    /// Tokens computed before this step by request id, in batch order, prefix hits included.
    #[getter]
    fn num_computed_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // A dict that has the keys already is filled in half the time.
        let dict = self.names.ones(py)?;
        self.names.fill(&dict, |at| self.planned.computed(at))?;
        Ok(dict)
    }

    /// Rows that the batch of a decode step is padded to; 0 for another step.
    #[getter]
    fn num_seqs_padded(&self) -> u32 {
        self.planned.num_seqs_padded()
    }

    /// The compiled size that runs: the token bucket of a prefill, the batch bucket of a decode step.
    #[getter]
    fn padded_tokens(&self) -> u32 {
        self.planned.padded_tokens()
    }

    /// Requests that ended since the last completed step, cancelled ones too.
    ///
    /// Repeated until a step that carries them is completed, so that a worker never misses one. A worker handles
    /// the ended ids of a step before its new requests, since an id may be used again once its request ended.
    #[getter]
    fn finished_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.finished.iter().map(|id| id.bind(py)))
    }

    /// KV blocks of a scheduled request, enough for the step's tokens; `KeyError` for any other id.
    fn block_ids(&self, id: &Bound<'_, PyString>) -> PyResult<Vec<u32>> {
        let at = self.names.position(id)?;
        let blocks = self.scheduler.get().step_blocks(&self.planned, at)?;
        blocks.ok_or_else(|| PyValueError::new_err("step: too old: its blocks may have been handed out again"))
    }

    fn __len__(&self) -> usize {
        self.planned.rows().len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Step({}, {})", self.kind(), self.num_scheduled_tokens(py)?.repr()?))
    }
}
