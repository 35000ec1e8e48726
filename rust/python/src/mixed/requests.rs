//! `Requests`: a read-only sequence of the waiting or running requests.

use pyo3::exceptions::{PyIndexError, PyOverflowError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::pyclass::CompareOp;
use pyo3::types::{PyIterator, PyList, PySlice, PyTuple};

use super::req::Req;
use super::scheduler::{Queue, Scheduler};

/// A read-only sequence of the waiting or running requests of a `Scheduler`, oldest first.
///
/// It always shows the current state of the scheduler. An iterator covers the requests present when it was created, so
/// the scheduler may change during the iteration. The sequence equals a list of the same requests; a slice is a list.
#[pyclass(frozen, sequence, module = "neuron_sched")]
pub(crate) struct Requests {
    scheduler: Py<Scheduler>,
    queue: Queue,
}

impl Requests {
    pub(super) fn new(scheduler: Py<Scheduler>, queue: Queue) -> Self {
        Self { scheduler, queue }
    }

    /// Return a list of the current requests.
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.scheduler.get().queued(py, self.queue)?)
    }
}

#[pymethods]
impl Requests {
    fn __len__(&self) -> PyResult<usize> {
        self.scheduler.get().num_queued(self.queue)
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if index.is_instance_of::<PySlice>() {
            return self.list(py)?.into_any().get_item(index);
        }
        let out_of_range = || PyIndexError::new_err("index out of range");
        let index: isize = index
            .extract()
            .map_err(|error: PyErr| if error.is_instance_of::<PyOverflowError>(py) { out_of_range() } else { error })?;
        let req = self.scheduler.get().queued_at(py, self.queue, index)?;
        req.map(|req| req.into_bound(py).into_any()).ok_or_else(out_of_range)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.list(py)?.try_iter()
    }

    fn __reversed__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let list = self.list(py)?;
        list.reverse()?;
        list.try_iter()
    }

    fn __contains__(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        match value.cast::<Req>() {
            Ok(req) => self.scheduler.get().is_queued(self.queue, req.get()),
            Err(_) => self.list(py)?.contains(value),
        }
    }

    /// Return the position of the first request that equals `value`. Raise `ValueError` if there is none.
    ///
    /// `bounds` are the start and stop of `list.index`.
    #[pyo3(signature = (value, *bounds), text_signature = "($self, value, /, *bounds)")]
    fn index<'py>(&self, value: &Bound<'py, PyAny>, bounds: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        let arguments = [value.clone()].into_iter().chain(bounds.iter());
        self.list(value.py())?.call_method1("index", PyTuple::new(value.py(), arguments.collect::<Vec<_>>())?)
    }

    /// Return the number of requests that equal `value`.
    #[pyo3(text_signature = "($self, value, /)")]
    fn count<'py>(&self, py: Python<'py>, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.list(py)?.call_method1("count", (value,))
    }

    fn __richcmp__<'py>(&self, other: &Bound<'py, PyAny>, op: CompareOp) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        let other = match other.cast::<Self>() {
            Ok(other) => other.get().list(py)?.into_any(),
            Err(_) if other.is_instance_of::<PyList>() => other.clone(),
            Err(_) => return Ok(py.NotImplemented().into_bound(py)),
        };
        match op {
            CompareOp::Eq | CompareOp::Ne => self.list(py)?.rich_compare(other, op),
            _ => Ok(py.NotImplemented().into_bound(py)),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Requests({})", self.list(py)?.repr()?))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.scheduler)
    }
}
