//! `Outcome`: one emitted token.

use pyo3::prelude::*;
use pyo3::types::PyString;

/// A token emitted by a step.
// The fields are Python objects, so that reading one is as fast as reading a slot of a Python class.
#[pyclass(frozen, get_all, module = "neuron_sched")]
pub(crate) struct Outcome {
    /// Id of the request.
    id: Py<PyString>,
    /// Token id; `None` if it was not passed to `complete`.
    token: Py<PyAny>,
    /// `"stop"` or `"length"` for the last token of a request, else `None`.
    ///
    /// A stop token takes precedence over the length.
    finish_reason: Py<PyAny>,
}

impl Outcome {
    pub(super) fn new<'py>(
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
