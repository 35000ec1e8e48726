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
pub(crate) struct Names {
    pub(crate) rows: Vec<Row>,
    ids: Py<PyTuple>,
    /// {id: 1}, made when first read.
    ones: PyOnceLock<Py<PyDict>>,
    /// {id: position}, made when first read.
    positions: PyOnceLock<Py<PyDict>>,
    /// An outcome of each row that tells neither a token id nor an end, made when first read.
    plain: PyOnceLock<Py<PyTuple>>,
}

impl Names {
    pub(crate) fn new(py: Python<'_>, rows: &[Row], ids: Vec<Py<PyString>>) -> PyResult<Self> {
        let ids = PyTuple::new(py, ids)?.unbind();
        Ok(Self {
            rows: rows.to_vec(),
            ids,
            ones: PyOnceLock::new(),
            positions: PyOnceLock::new(),
            plain: PyOnceLock::new(),
        })
    }

    /// The names, in batch order.
    pub(crate) fn ids(&self, py: Python<'_>) -> Py<PyTuple> {
        self.ids.clone_ref(py)
    }

    /// The name of the row at `at`.
    pub(crate) fn id(&self, py: Python<'_>, at: usize) -> String {
        self.ids.bind(py).get_item(at).map_or_else(|_| String::new(), |id| id.to_string())
    }

    fn dict<'py>(&self, py: Python<'py>, value: impl Fn(usize) -> u32) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        self.fill(&dict, value)?;
        Ok(dict)
    }

    fn fill(&self, dict: &Bound<'_, PyDict>, value: impl Fn(usize) -> u32) -> PyResult<()> {
        for (at, id) in self.ids.bind(dict.py()).iter().enumerate() {
            dict.set_item(id, value(at))?;
        }
        Ok(())
    }

    /// A fresh {id: 1}.
    fn ones<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.ones.get_or_try_init(py, || self.dict(py, |_| 1).map(Bound::unbind))?.bind(py).copy()
    }

    fn plain<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyTuple>> {
        let make = || {
            let outcome = |id: Bound<'py, PyAny>| Outcome::new(id.cast_into::<PyString>()?, None, None);
            let outcomes: Vec<_> = self.ids.bind(py).iter().map(outcome).collect::<PyResult<_>>()?;
            PyTuple::new(py, outcomes).map(Bound::unbind)
        };
        Ok(self.plain.get_or_try_init(py, make)?.bind(py))
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

/// One token that a step emitted.
// The fields are Python objects, so that reading one costs what a slot costs.
#[pyclass(frozen, get_all, module = "neuron_sched")]
pub(crate) struct Outcome {
    /// The request that emitted it.
    id: Py<PyString>,
    /// The token id; None where `complete` was not told.
    token: Py<PyAny>,
    /// Set on the last token of a request; a stop token wins over the length.
    finish_reason: Py<PyAny>,
}

impl Outcome {
    fn new<'py>(
        id: Bound<'py, PyString>,
        token: Option<u32>,
        finish_reason: Option<&'static str>,
    ) -> PyResult<Bound<'py, Self>> {
        let py = id.py();
        let token = token.into_pyobject(py)?.unbind();
        let finish_reason = finish_reason.into_pyobject(py)?.unbind();
        Bound::new(py, Self { id: id.unbind(), token, finish_reason })
    }
}

#[pymethods]
impl Outcome {
    fn __eq__(&self, py: Python<'_>, other: &Self) -> PyResult<bool> {
        Ok(self.id.bind(py).as_any().eq(other.id.bind(py))?
            && self.token.bind(py).eq(other.token.bind(py))?
            && self.finish_reason.bind(py).eq(other.finish_reason.bind(py))?)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (id, token) = (self.id.bind(py).repr()?, self.token.bind(py).repr()?);
        Ok(format!("Outcome(id={id}, token={token}, finish_reason={})", self.finish_reason.bind(py).repr()?))
    }
}

/// The emitted tokens of a step in batch order: as a list, but its items are made when they are read.
#[pyclass(frozen, sequence, module = "neuron_sched")]
pub(crate) struct Outcomes {
    pub(crate) completion: Arc<Completion>,
    pub(crate) names: Arc<Names>,
}

impl Outcomes {
    fn outcome<'py>(&self, py: Python<'py>, outcome: CoreOutcome) -> PyResult<Bound<'py, Outcome>> {
        if outcome.token.is_none() && outcome.finish.is_none() {
            return self.names.plain(py)?.get_item(outcome.at)?.cast_into::<Outcome>().map_err(PyErr::from);
        }
        let id = self.names.ids.bind(py).get_item(outcome.at)?.cast_into::<PyString>()?;
        Outcome::new(id, outcome.token, outcome.finish.map(Finish::name))
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        if self.completion.is_plain() {
            return Ok(self.names.plain(py)?.to_list());
        }
        let items: Vec<Bound<'py, Outcome>> =
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
        Ok(self.outcome(py, outcome)?.into_any())
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
