//! `NeuronConfig` and `Buckets`: Python values that the core checks.

use neuron_sched_core::bucket;
use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::error::Fault;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::error::to_py;

/// Numbers and lists as Python gives them; a wrong type becomes a fault, reported with all the others.
struct Reader {
    faults: Vec<Fault>,
}

impl Reader {
    fn fault<T>(&mut self, field: &'static str, value: &Bound<'_, PyAny>, expected: &str) -> Option<T> {
        let shown = value.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
        self.faults.push(Fault::new(field, shown, expected));
        None
    }

    /// A whole number; one that 64 bits do not hold is as wrong as any other that is far too large.
    fn int(&mut self, field: &'static str, value: &Bound<'_, PyAny>) -> Option<i64> {
        if value.is_none() {
            return None;
        }
        whole(value).or_else(|| self.fault(field, value, "a whole number"))
    }

    fn ints(&mut self, field: &'static str, value: &Bound<'_, PyAny>) -> Option<Vec<i64>> {
        if value.is_none() {
            return None;
        }
        let items = sequence(value).and_then(|items| items.iter().map(whole).collect());
        items.or_else(|| self.fault(field, value, "a list of whole numbers"))
    }

    fn name(&mut self, field: &'static str, value: &Bound<'_, PyAny>) -> Option<String> {
        if value.is_none() {
            return None;
        }
        value.cast::<PyString>().map(|s| s.to_string()).ok().or_else(|| self.fault(field, value, "a string"))
    }

    fn flag(&mut self, field: &'static str, value: &Bound<'_, PyAny>) -> Option<bool> {
        if value.is_none() {
            return None;
        }
        value.cast::<PyBool>().map(|b| b.is_true()).ok().or_else(|| self.fault(field, value, "True or False"))
    }

    fn costs(&mut self, field: &'static str, value: &Bound<'_, PyAny>) -> Option<Vec<(i64, f64)>> {
        if value.is_none() {
            return None;
        }
        let read = |dict: &Bound<'_, PyDict>| {
            dict.iter().map(|(size, cost)| Some((whole(&size)?, number(&cost)?))).collect::<Option<Vec<_>>>()
        };
        let table = value.cast::<PyDict>().ok().and_then(read);
        table.or_else(|| self.fault(field, value, "a dict {padded tokens: cost}"))
    }
}

/// An int that is no bool, in 64 bits.
fn whole(value: &Bound<'_, PyAny>) -> Option<i64> {
    if value.is_instance_of::<PyBool>() || !value.is_instance_of::<PyInt>() {
        return None;
    }
    value.extract().ok()
}

fn number(value: &Bound<'_, PyAny>) -> Option<f64> {
    if value.is_instance_of::<PyBool>() {
        return None;
    }
    if value.is_instance_of::<PyInt>() || value.is_instance_of::<PyFloat>() { value.extract().ok() } else { None }
}

/// The items of a list or a tuple.
fn sequence<'py>(value: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Some(list.iter().collect());
    }
    value.cast::<PyTuple>().ok().map(|tuple| tuple.iter().collect())
}

/// Ascending compiled sizes and the smallest one that holds a count.
#[pyclass(frozen, eq, hash, module = "neuron_sched", from_py_object)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Buckets {
    inner: bucket::Buckets,
}

#[pymethods]
impl Buckets {
    #[new]
    fn new(sizes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut reader = Reader { faults: Vec::new() };
        let sizes = reader.ints("sizes", sizes);
        let inner = match sizes {
            Some(sizes) => bucket::Buckets::new("sizes", &sizes, None),
            None => Err(reader.faults.pop().unwrap_or_else(|| Fault::new("sizes", "None", "a list of whole numbers"))),
        };
        inner.map(|inner| Self { inner }).map_err(|fault| pyo3::exceptions::PyValueError::new_err(fault.to_string()))
    }

    fn fit(&self, count: &Bound<'_, PyAny>) -> PyResult<u32> {
        let count = match whole(count).map(u32::try_from) {
            Some(Ok(count)) => count,
            _ => {
                let expected =
                    format!("count: {}: expected a whole number from 0 to {}", count.repr()?, self.inner.last());
                return Err(pyo3::exceptions::PyValueError::new_err(expected));
            }
        };
        self.inner.fit(count).map_err(|error| to_py(&error))
    }

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

/// Checked configuration of the exclusive scheduler; an immutable value.
#[pyclass(frozen, module = "neuron_sched", from_py_object)]
#[derive(Clone)]
pub(crate) struct NeuronConfig {
    inner: Config,
}

impl NeuronConfig {
    /// The checked values.
    pub(crate) fn core(&self) -> &Config {
        &self.inner
    }
}

#[pymethods]
impl NeuronConfig {
    #[new]
    #[pyo3(signature = (**fields))]
    fn new(fields: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let _ = fields;
        Config::resolve(&RawConfig::default()).map(|inner| Self { inner }).map_err(|error| to_py(&error))
    }
}
