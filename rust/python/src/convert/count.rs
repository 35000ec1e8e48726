//! Counts as Python gives them.

use neuron_sched_core::error::{Error, Fault};
use neuron_sched_core::mixed::COUNT_MAX;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::value::{shown, whole};
use crate::error::to_py;

/// Reads `field`, which is an int or what counts as one (`numpy.int64`), but no bool. The core knows its
/// range: refused here is only what 64 bits do not hold.
pub(crate) fn count(field: &'static str, value: &Bound<'_, PyAny>, least: u64) -> PyResult<u64> {
    let fault = |expected: String| Fault::new(field, shown(value), expected);
    let Some(number) = whole(value) else {
        return Err(PyTypeError::new_err(fault("a whole number".to_owned()).to_string()));
    };
    number
        .extract()
        .map_err(|_| to_py(&Error::Invalid(vec![fault(format!("a whole number from {least} to {COUNT_MAX}"))])))
}
