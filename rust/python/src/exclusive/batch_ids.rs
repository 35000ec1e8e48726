//! `BatchIds`: the request ids of a batch.

use neuron_sched_core::request::Row;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};

use super::outcome::Outcome;

/// The request ids of a batch, shared by consecutive steps with the same rows.
pub(crate) struct BatchIds {
    pub(crate) rows: Vec<Row>,
    pub(super) ids: Py<PyTuple>,
    /// {id: 1}, created on first use.
    ones: PyOnceLock<Py<PyDict>>,
    /// {id: position in the batch}, created on first use.
    positions: PyOnceLock<Py<PyDict>>,
    /// The outcome of each row without a token id and without a finish reason, created on first use.
    default_outcomes: PyOnceLock<Py<PyTuple>>,
}

impl BatchIds {
    pub(crate) fn new(py: Python<'_>, rows: &[Row], ids: Vec<Py<PyString>>) -> PyResult<Self> {
        let ids = PyTuple::new(py, ids)?.unbind();
        Ok(Self {
            rows: rows.to_vec(),
            ids,
            ones: PyOnceLock::new(),
            positions: PyOnceLock::new(),
            default_outcomes: PyOnceLock::new(),
        })
    }

    /// Return the ids in batch order.
    pub(crate) fn tuple(&self, py: Python<'_>) -> Py<PyTuple> {
        self.ids.clone_ref(py)
    }

    /// Return the id of the row at position `at`.
    pub(crate) fn id(&self, py: Python<'_>, at: usize) -> String {
        self.ids.bind(py).get_item(at).map_or_else(|_| String::new(), |id| id.to_string())
    }

    /// Return a new {id: value}.
    pub(super) fn dict<'py>(&self, py: Python<'py>, value: impl Fn(usize) -> u32) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        self.fill(&dict, value)?;
        Ok(dict)
    }

    /// Set the value of each id in `dict`.
    pub(super) fn fill(&self, dict: &Bound<'_, PyDict>, value: impl Fn(usize) -> u32) -> PyResult<()> {
        for (at, id) in self.ids.bind(dict.py()).iter().enumerate() {
            dict.set_item(id, value(at))?;
        }
        Ok(())
    }

    /// Return a new {id: 1}.
    pub(super) fn ones<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.ones.get_or_try_init(py, || self.dict(py, |_| 1).map(Bound::unbind))?.bind(py).copy()
    }

    /// Return the outcome of each row without a token id and without a finish reason.
    pub(super) fn default_outcomes<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyTuple>> {
        let make = || {
            let outcome = |id: Bound<'py, PyAny>| Outcome::new(id.cast_into::<PyString>()?, None, None);
            let outcomes: Vec<_> = self.ids.bind(py).iter().map(outcome).collect::<PyResult<_>>()?;
            PyTuple::new(py, outcomes).map(Bound::unbind)
        };
        Ok(self.default_outcomes.get_or_try_init(py, make)?.bind(py))
    }

    /// Return the position of a request in the batch, or a `KeyError`.
    pub(super) fn position(&self, id: &Bound<'_, PyString>) -> PyResult<usize> {
        let py = id.py();
        let count = |at| u32::try_from(at).expect("rows are counted in 32 bits");
        let positions = self.positions.get_or_try_init(py, || self.dict(py, count).map(Bound::unbind))?.bind(py);
        match positions.get_item(id)? {
            Some(at) => at.extract(),
            None => Err(PyKeyError::new_err(id.clone().unbind())),
        }
    }
}
