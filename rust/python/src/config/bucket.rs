//! `Buckets`: a list of compiled sizes.

use neuron_sched_core::config;
use neuron_sched_core::error::{Error, Fault};
use pyo3::prelude::*;

use super::read::{Given, int};
use crate::convert::display;
use crate::error::to_py;

/// An ascending list of compiled sizes.
#[pyclass(frozen, eq, hash, module = "neuron_sched")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Buckets {
    inner: config::Buckets,
}

#[pymethods]
impl Buckets {
    #[new]
    fn new(sizes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let inner = match Vec::<i64>::read(sizes) {
            Some(sizes) => config::Buckets::new("sizes", &sizes, None),
            None => Err(Fault::new("sizes", display(sizes), Vec::<i64>::EXPECTED)),
        };
        inner.map(|inner| Self { inner }).map_err(|fault| to_py(&Error::Invalid(vec![fault])))
    }

    /// Return the smallest size of at least `count`, or 0 for 0.
    ///
    /// Raise `ValueError` if `count` is negative or exceeds the last size.
    fn fit(&self, count: &Bound<'_, PyAny>) -> PyResult<u32> {
        let read = int(count).and_then(|count| u32::try_from(count).ok());
        let Some(count) = read else {
            let expected = format!("a whole number from 0 to the last bucket, {}", self.inner.last());
            return Err(to_py(&Error::invalid("count", count.repr()?, expected)));
        };
        self.inner.fit(count).map_err(|error| to_py(&error))
    }

    /// All sizes, ascending.
    #[getter]
    fn sizes(&self) -> Vec<u32> {
        self.inner.sizes().to_vec()
    }

    fn __len__(&self) -> usize {
        self.inner.sizes().len()
    }

    fn __repr__(&self) -> String {
        format!("Buckets({:?})", self.inner.sizes())
    }
}
