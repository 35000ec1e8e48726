//! `Explanation`: why the head of the queue waits.

use pyo3::prelude::*;
use pyo3::types::PyString;

/// Why the head of the queue waits, and the numbers behind it in KV blocks.
#[pyclass(frozen, get_all, module = "neuron_sched")]
pub(crate) struct Explanation {
    /// The request at the head.
    pub(crate) id: Py<PyString>,
    /// Stable name of what it waits for; `"ready"`: nothing, the next `schedule()` takes it.
    pub(crate) reason: Py<PyString>,
    /// What it needs at worst.
    pub(crate) needed: u32,
    /// What the running requests have reserved.
    pub(crate) reserved: u32,
    /// The whole cache.
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
