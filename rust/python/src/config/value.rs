//! Checked field values as Python values.

use neuron_sched_core::config::{Buckets, Choice, Chunking, KvAdmission};
use neuron_sched_core::queue::Policy;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A checked field value that Python can read.
pub(super) trait ToPython {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
}

impl ToPython for u32 {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.into_pyobject(py)?.into_any())
    }
}

impl ToPython for bool {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.into_pyobject(py)?.to_owned().into_any())
    }
}

impl ToPython for Buckets {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.sizes().into_pyobject(py)
    }
}

impl ToPython for Vec<(u32, f64)> {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let costs = PyDict::new(py);
        for (size, cost) in self {
            costs.set_item(size, cost)?;
        }
        Ok(costs.into_any())
    }
}

impl<T: ToPython> ToPython for Option<T> {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.as_ref().map_or_else(|| Ok(py.None().into_bound(py)), |value| value.to_python(py))
    }
}

macro_rules! choices {
    ($($choice:ty),+) => {$(
        impl ToPython for $choice {
            fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                Ok(self.name().into_pyobject(py)?.into_any())
            }
        }
    )+};
}

choices!(KvAdmission, Chunking, Policy);
