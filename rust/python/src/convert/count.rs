//! Conversion of Python values to 64-bit counts.

use neuron_sched_core::error::{Error, Fault};
use neuron_sched_core::mixed::COUNT_MAX;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::value::{as_int, display};
use crate::error::to_py;

/// Return the value of `field` as a count: an int, or an object with `__index__` (such as `numpy.int64`), but not a
/// bool. The core checks the range; only values that 64 bits do not hold are refused here.
pub(crate) fn count(field: &'static str, value: &Bound<'_, PyAny>, least: u64) -> PyResult<u64> {
    let fault = |expected: String| Fault::new(field, display(value), expected);
    let Some(number) = as_int(value) else {
        return Err(PyTypeError::new_err(fault("a whole number".to_owned()).to_string()));
    };
    number
        .extract()
        .map_err(|_| to_py(&Error::Invalid(vec![fault(format!("a whole number from {least} to {COUNT_MAX}"))])))
}
