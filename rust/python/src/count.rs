//! Counts as Python gives them.

use neuron_sched_core::error::{Error, Fault};
use neuron_sched_core::mixed::COUNT_MAX;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::error::to_py;

/// `value` as Python prints it, for a message; an object that cannot be printed is named by its type.
pub(crate) fn shown(value: &Bound<'_, PyAny>) -> String {
    let printed = value.repr().map(|repr| repr.to_string());
    printed.unwrap_or_else(|_| value.get_type().name().map_or_else(|_| "?".to_owned(), |name| format!("<{name}>")))
}

/// Reads `field`, which is an int or what counts as one (`numpy.int64`), but no bool. The core knows its
/// range: refused here is only what 64 bits do not hold.
pub(crate) fn count(field: &'static str, value: &Bound<'_, PyAny>, least: u64) -> PyResult<u64> {
    let fault = |expected: String| Fault::new(field, shown(value), expected);
    let not_whole = || PyTypeError::new_err(fault("a whole number".to_owned()).to_string());
    if value.is_instance_of::<PyBool>() {
        return Err(not_whole());
    }
    value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            to_py(&Error::Invalid(vec![fault(format!("a whole number from {least} to {COUNT_MAX}"))]))
        } else if error.is_instance_of::<PyTypeError>(value.py()) {
            not_whole()
        } else {
            error
        }
    })
}
