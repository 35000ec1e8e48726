//! `Step`, `Outcome`: what a step is and what came of it. Whatever a caller may not read is made when read.

use std::sync::Arc;

use neuron_sched_core::exclusive::{Completion, Finish, Outcome as CoreOutcome};
use neuron_sched_core::request::Row;
use neuron_sched_core::step::Step as CoreStep;
use pyo3::exceptions::{PyIndexError, PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PySlice, PyString, PyTuple};

use crate::scheduler::BucketScheduler;

/// The names of a batch, shared by all steps that run the same rows.
pub(crate) struct Batch {
    pub(crate) rows: Vec<Row>,
    ids: Py<PyTuple>,
    /// {id: 1}, made when first read.
    ones: PyOnceLock<Py<PyDict>>,
    /// {id: position}, made when first read.
    positions: PyOnceLock<Py<PyDict>>,
}

impl Batch {
    pub(crate) fn new(py: Python<'_>, rows: &[Row], ids: Vec<Py<PyString>>) -> PyResult<Self> {
        let ids = PyTuple::new(py, ids)?.unbind();
        Ok(Self { rows: rows.to_vec(), ids, ones: PyOnceLock::new(), positions: PyOnceLock::new() })
    }

    fn dict<'py>(&self, py: Python<'py>, value: impl Fn(usize) -> u32) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (at, id) in self.ids.bind(py).iter().enumerate() {
            dict.set_item(id, value(at))?;
        }
        Ok(dict)
    }

    /// A fresh {id: 1}.
    fn ones<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.ones.get_or_try_init(py, || self.dict(py, |_| 1).map(Bound::unbind))?.bind(py).copy()
    }

    fn position(&self, id: &Bound<'_, PyString>) -> PyResult<usize> {
        let py = id.py();
        let count = |at| u32::try_from(at).expect("rows are counted in 32 bits");
        let positions = self.positions.get_or_try_init(py, || self.dict(py, count).map(Bound::unbind))?.bind(py);
        match positions.get_item(id)? {
            Some(at) => at.extract(),
            None => Err(PyKeyError::new_err(id.clone().unbind())),
        }
    }
}

/// One planned step.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Step {
    pub(crate) scheduler: Py<BucketScheduler>,
    pub(crate) planned: Arc<CoreStep>,
    pub(crate) batch: Arc<Batch>,
    pub(crate) finished: Vec<Py<PyString>>,
}

#[pymethods]
impl Step {
    #[getter]
    fn kind(&self) -> &'static str {
        self.planned.kind().name()
    }

    #[getter]
    fn num_scheduled_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.planned.is_uniform() { self.batch.ones(py) } else { self.batch.dict(py, |at| self.planned.tokens(at)) }
    }

    #[getter]
    fn num_scheduled_tokens_padded<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.planned.is_uniform() { self.batch.ones(py) } else { self.batch.dict(py, |at| self.planned.padded(at)) }
    }

    #[getter]
    fn num_computed_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.batch.dict(py, |at| self.planned.computed(at))
    }

    #[getter]
    fn num_seqs_padded(&self) -> u32 {
        self.planned.num_seqs_padded()
    }

    #[getter]
    fn padded_tokens(&self) -> u32 {
        self.planned.padded_tokens()
    }

    #[getter]
    fn finished_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.finished.iter().map(|id| id.bind(py)))
    }

    fn block_ids(&self, id: &Bound<'_, PyString>) -> PyResult<Vec<u32>> {
        let at = self.batch.position(id)?;
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

/// One emitted token.
#[pyclass(frozen, get_all, module = "neuron_sched")]
pub(crate) struct Outcome {
    id: Py<PyString>,
    token: Option<u32>,
    finish_reason: Option<&'static str>,
}

#[pymethods]
impl Outcome {
    fn __eq__(&self, py: Python<'_>, other: &Self) -> PyResult<bool> {
        let same = (self.token, self.finish_reason) == (other.token, other.finish_reason);
        Ok(same && self.id.bind(py).as_any().eq(other.id.bind(py))?)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let token = self.token.map_or_else(|| "None".to_owned(), |token| token.to_string());
        let reason = self.finish_reason.map_or_else(|| "None".to_owned(), |reason| format!("'{reason}'"));
        Ok(format!("Outcome(id={}, token={token}, finish_reason={reason})", self.id.bind(py).repr()?))
    }
}

/// The emitted tokens of a step, in batch order: a sequence that makes its items when they are read.
#[pyclass(frozen, sequence, module = "neuron_sched")]
pub(crate) struct Outcomes {
    pub(crate) completion: Arc<Completion>,
    pub(crate) batch: Arc<Batch>,
}

impl Outcomes {
    fn outcome(&self, py: Python<'_>, outcome: CoreOutcome) -> PyResult<Outcome> {
        let id = self.batch.ids.bind(py).get_item(outcome.at)?.cast_into::<PyString>()?.unbind();
        Ok(Outcome { id, token: outcome.token, finish_reason: outcome.finish.map(Finish::name) })
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let items: Vec<Outcome> =
            self.completion.iter().map(|outcome| self.outcome(py, outcome)).collect::<PyResult<_>>()?;
        PyList::new(py, items)
    }
}

#[pymethods]
impl Outcomes {
    fn __len__(&self) -> usize {
        self.completion.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if index.is_instance_of::<PySlice>() {
            return self.list(py)?.as_any().get_item(index);
        }
        let at: isize = index.extract()?;
        let len = self.completion.len();
        let at = if at < 0 { len.checked_sub(at.unsigned_abs()) } else { Some(at.unsigned_abs()) };
        let outcome = at.and_then(|at| self.completion.outcome(at));
        let outcome = outcome.ok_or_else(|| PyIndexError::new_err("outcome index out of range"))?;
        Ok(Bound::new(py, self.outcome(py, outcome)?)?.into_any())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.list(py)?.try_iter()?.into_any())
    }

    fn __eq__<'py>(&self, py: Python<'py>, other: &Bound<'py, PyAny>) -> PyResult<bool> {
        match other.cast::<Self>() {
            Ok(other) => self.list(py)?.eq(other.get().list(py)?),
            Err(_) => self.list(py)?.eq(other),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.list(py)?.repr()?.to_string())
    }
}
