//! Python numbers as exact decimals.

use neuron_sched_core::error::Fault;
use neuron_sched_core::sim::decimal;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyFloat, PyString, PyType};

use crate::convert::{shown, whole};

/// `value` times 10^`places`, rounded half up. Takes an int, a float (by the shortest decimal that stands for
/// it), a text or a `decimal.Decimal`.
pub(super) fn units(field: &'static str, value: &Bound<'_, PyAny>, places: u32) -> Result<u64, Fault> {
    let read = match text(value) {
        Some(text) => decimal::units(&text, places),
        None => Err(decimal::Unreadable::Text),
    };
    read.map_err(|reason| reason.fault(field, &shown(value)))
}

fn text(value: &Bound<'_, PyAny>) -> Option<String> {
    static DECIMAL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    if let Ok(text) = value.cast::<PyString>() {
        return Some(text.to_string());
    }
    if value.is_instance_of::<PyFloat>() {
        return value.extract::<f64>().ok().map(|float| format!("{float:e}"));
    }
    if let Some(number) = whole(value) {
        return number.str().ok().map(|digits| digits.to_string());
    }
    let decimal = DECIMAL.import(value.py(), "decimal", "Decimal").ok()?;
    value.is_instance(decimal).ok()?.then(|| value.to_string())
}

/// A whole number from `least` to `most`.
pub(super) fn within<T: TryFrom<i128> + PartialOrd + std::fmt::Display>(
    field: &'static str,
    value: &Bound<'_, PyAny>,
    (least, most): (T, T),
) -> Result<T, Fault> {
    let number =
        whole(value).and_then(|number| number.extract::<i128>().ok()).and_then(|number| T::try_from(number).ok());
    number
        .filter(|number| (&least..=&most).contains(&number))
        .ok_or_else(|| Fault::new(field, shown(value), format!("a whole number from {least} to {most}")))
}
