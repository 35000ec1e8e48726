//! `Outcomes`: the emitted tokens of a step, as a sequence that creates its items when they are read.

use std::sync::Arc;

use neuron_sched_core::exclusive::{Completion, Finish, Outcome as CoreOutcome};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice, PyString};

use super::batch_ids::BatchIds;
use super::outcome::Outcome;

/// A read-only sequence of the tokens emitted by a step, in batch order.
///
/// Items are created when they are read. The sequence equals a list of the same outcomes; a slice is a list.
#[pyclass(frozen, sequence, module = "neuron_sched")]
pub(crate) struct Outcomes {
    pub(crate) completion: Arc<Completion>,
    pub(crate) ids: Arc<BatchIds>,
}

impl Outcomes {
    fn outcome<'py>(&self, py: Python<'py>, outcome: CoreOutcome) -> PyResult<Bound<'py, Outcome>> {
        if outcome.token.is_none() && outcome.finish.is_none() {
            return self.ids.default_outcomes(py)?.get_item(outcome.at)?.cast_into::<Outcome>().map_err(PyErr::from);
        }
        let id = self.ids.ids.bind(py).get_item(outcome.at)?.cast_into::<PyString>()?;
        Outcome::new(id, outcome.token, outcome.finish.map(Finish::name))
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        if self.completion.is_plain() {
            return Ok(self.ids.default_outcomes(py)?.to_list());
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
