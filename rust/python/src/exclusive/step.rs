//! `Step`: one planned step. Its Python values are created when they are read.

use std::sync::Arc;

use neuron_sched_core::decide::Step as CoreStep;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use super::batch_ids::BatchIds;
use super::scheduler::BucketScheduler;
use crate::convert::instance;

/// A planned step: the scheduled requests, their token counts and the padded size.
///
/// All values are as of the planning. They can be read until the step is completed and `schedule()` is called again.
/// Reading a value later returns the same value or raises `ValueError`.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Step {
    pub(crate) scheduler: Py<BucketScheduler>,
    pub(crate) planned: Arc<CoreStep>,
    pub(crate) ids: Arc<BatchIds>,
    pub(crate) finished: Vec<Py<PyString>>,
}

#[pymethods]
impl Step {
    /// `"prefill"`, `"decode"`, or `"idle"` if no request is scheduled.
    #[getter]
    fn kind(&self) -> &'static str {
        self.planned.kind().name()
    }

    /// Unpadded number of tokens by request id, in batch order, as a new dict.
    #[getter]
    fn num_scheduled_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.planned.is_uniform() { self.ids.ones(py) } else { self.ids.dict(py, |at| self.planned.tokens(at)) }
    }

    /// Padded number of tokens by request id, in batch order, as a new dict.
    ///
    /// In a prefill step of several prompts the last prompt carries the padding, so that the values add up to the token
    /// bucket.
    #[getter]
    fn num_scheduled_tokens_padded<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.planned.is_uniform() { self.ids.ones(py) } else { self.ids.dict(py, |at| self.planned.padded(at)) }
    }

    /// Number of tokens computed before the step by request id, in batch order, as a new dict.
    ///
    /// Cached tokens of a prefix-cache hit are included.
    #[getter]
    fn num_computed_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // Setting the values of existing keys takes half the time of inserting them.
        let dict = self.ids.ones(py)?;
        self.ids.fill(&dict, |at| self.planned.computed(at))?;
        Ok(dict)
    }

    /// Batch bucket of a decode step in rows; 0 for other steps.
    #[getter]
    fn num_seqs_padded(&self) -> u32 {
        self.planned.num_seqs_padded()
    }

    /// Compiled size of the step: the token bucket of a prefill step, the batch bucket of a decode step.
    #[getter]
    fn padded_tokens(&self) -> u32 {
        self.planned.padded_tokens()
    }

    /// Ids of the requests that finished or were cancelled since the last completed step.
    ///
    /// An id is repeated in every step until a step that lists it is completed, so that a worker never misses it. A
    /// worker removes these requests before it adds the new ones of the step, because a new request may reuse an id.
    #[getter]
    fn finished_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.finished.iter().map(|id| id.bind(py)))
    }

    /// Return the KV blocks of a scheduled request, in order of position; they hold the tokens of the step.
    ///
    /// Raise `KeyError` for any other id, and `ValueError` if the step is too old.
    fn block_ids(&self, id: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let at = self.ids.position(instance("id", id)?)?;
        let blocks = self.scheduler.get().step_blocks(&self.planned, at)?;
        blocks.ok_or_else(|| PyValueError::new_err("step: too old: its KV blocks may have been reallocated"))
    }

    fn __len__(&self) -> usize {
        self.planned.rows().len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Step({}, {})", self.kind(), self.num_scheduled_tokens(py)?.repr()?))
    }
}
