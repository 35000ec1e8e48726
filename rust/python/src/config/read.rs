//! Conversion of field values. A value of a wrong type is a fault that is reported together with all others.

use neuron_sched_core::error::Fault;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyList, PyString, PyTuple};

use crate::convert::{as_int, display};

/// The faults found while fields are read.
pub(super) struct Reader {
    faults: Vec<Fault>,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self { faults: Vec::new() }
    }

    /// Read `field`. `None` if the value is absent or `None`, which both mean the default, or if a fault was added.
    pub(super) fn read<T: Given>(&mut self, field: &'static str, value: Option<&Bound<'_, PyAny>>) -> Option<T> {
        let value = value.filter(|value| !value.is_none())?;
        let read = T::read(value);
        if read.is_none() {
            self.faults.push(Fault::new(field, display(value), T::EXPECTED));
        }
        read
    }

    pub(super) fn into_faults(self) -> Vec<Fault> {
        self.faults
    }
}

/// A type of values as given, before the core checks them.
pub(super) trait Given: Sized {
    /// Expectation in the fault for a value of another type.
    const EXPECTED: &'static str;

    fn read(value: &Bound<'_, PyAny>) -> Option<Self>;
}

impl Given for i64 {
    const EXPECTED: &'static str = "a whole number";

    fn read(value: &Bound<'_, PyAny>) -> Option<Self> {
        int(value)
    }
}

impl Given for Vec<i64> {
    const EXPECTED: &'static str = "a list of whole numbers";

    fn read(value: &Bound<'_, PyAny>) -> Option<Self> {
        sequence(value)?.iter().map(int).collect()
    }
}

impl Given for String {
    const EXPECTED: &'static str = "a string";

    fn read(value: &Bound<'_, PyAny>) -> Option<Self> {
        value.cast::<PyString>().map(ToString::to_string).ok()
    }
}

impl Given for bool {
    const EXPECTED: &'static str = "True or False";

    fn read(value: &Bound<'_, PyAny>) -> Option<Self> {
        value.cast::<PyBool>().map(PyBoolMethods::is_true).ok()
    }
}

impl Given for Vec<(i64, f64)> {
    const EXPECTED: &'static str = "a dict {padded tokens: cost}";

    fn read(value: &Bound<'_, PyAny>) -> Option<Self> {
        let costs = value.cast::<PyDict>().ok()?;
        costs.iter().map(|(size, cost)| Some((int(&size)?, number(&cost)?))).collect()
    }
}

/// Return a whole number. `None` also if it does not fit 64 bits, which is far beyond every bound.
pub(super) fn int(value: &Bound<'_, PyAny>) -> Option<i64> {
    as_int(value)?.extract().ok()
}

fn number(value: &Bound<'_, PyAny>) -> Option<f64> {
    if value.is_instance_of::<PyFloat>() { value.extract().ok() } else { as_int(value)?.extract().ok() }
}

/// Return the items of a list or a tuple.
fn sequence<'py>(value: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Some(list.iter().collect());
    }
    value.cast::<PyTuple>().ok().map(|tuple| tuple.iter().collect())
}
