//! `Explanation`: why the head of the queue waits.

use pyo3::prelude::*;
use pyo3::types::PyString;

/// Why the head of the queue waits, with the KV blocks that admission compares.
#[pyclass(frozen, get_all, module = "neuron_sched")]
pub(crate) struct Explanation {
    /// Id of the request at the head of the queue.
    pub(crate) id: Py<PyString>,
    /// Stable name of the reason; `"ready"` if the next `schedule()` admits the request.
    pub(crate) reason: Py<PyString>,
    /// Worst case of the request, in KV blocks.
    pub(crate) needed: u32,
    /// Reservations of the running requests, in KV blocks.
    pub(crate) reserved: u32,
    /// Capacity of the whole KV cache, in KV blocks.
    pub(crate) usable: u32,
}

#[pymethods]
impl Explanation {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { needed, reserved, usable, .. } = self;
        let (id, reason) = (self.id.bind(py).repr()?, self.reason.bind(py).repr()?);
        Ok(format!("Explanation(id={id}, reason={reason}, needed={needed}, reserved={reserved}, usable={usable})"))
    }
}
