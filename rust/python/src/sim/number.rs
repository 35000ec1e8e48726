//! Exact conversion of Python numbers.

use neuron_sched_core::error::Fault;
use neuron_sched_core::sim::decimal;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyFloat, PyString, PyType};

use crate::convert::{as_int, display};

/// Return `value` times 10^`places`, rounded half up.
///
/// `value` is an int, a float (read as the shortest decimal that converts to it), a str or a `decimal.Decimal`.
pub(super) fn units(field: &'static str, value: &Bound<'_, PyAny>, places: u32) -> Result<u64, Fault> {
    let read = match text(value) {
        Some(text) => decimal::units(&text, places),
        None => Err(decimal::Unreadable::Text),
    };
    read.map_err(|reason| reason.fault(field, &display(value)))
}

fn text(value: &Bound<'_, PyAny>) -> Option<String> {
    static DECIMAL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    if let Ok(text) = value.cast::<PyString>() {
        return Some(text.to_string());
    }
    if value.is_instance_of::<PyFloat>() {
        return value.extract::<f64>().ok().map(|float| format!("{float:e}"));
    }
    if let Some(number) = as_int(value) {
        return number.str().ok().map(|digits| digits.to_string());
    }
    let decimal = DECIMAL.import(value.py(), "decimal", "Decimal").ok()?;
    value.is_instance(decimal).ok()?.then(|| value.to_string())
}

/// Read a whole number from `least` to `most`.
pub(super) fn within<T: TryFrom<i128> + PartialOrd + std::fmt::Display>(
    field: &'static str,
    value: &Bound<'_, PyAny>,
    (least, most): (T, T),
) -> Result<T, Fault> {
    let number =
        as_int(value).and_then(|number| number.extract::<i128>().ok()).and_then(|number| T::try_from(number).ok());
    number
        .filter(|number| (&least..=&most).contains(&number))
        .ok_or_else(|| Fault::new(field, display(value), format!("a whole number from {least} to {most}")))
}
