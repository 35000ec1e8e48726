//! Python values as messages show them and as whole numbers.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyInt, PyList, PyString};

/// The longest value that a message shows whole, in characters.
const SHOWN_MAX: usize = 80;

/// `value` as Python prints it, cut where it is long; one that cannot be printed is named by its type.
pub(crate) fn shown(value: &Bound<'_, PyAny>) -> String {
    let Ok(printed) = value.repr() else {
        return value.get_type().name().map_or_else(|_| "?".to_owned(), |name| format!("<{name}>"));
    };
    let printed = printed.to_string();
    if printed.chars().count() <= SHOWN_MAX {
        return printed;
    }
    printed.chars().take(SHOWN_MAX).chain("...".chars()).collect()
}

/// The int that `value` stands for, of any size: an int, or what says that it is one (`numpy.int64`), but no
/// bool.
pub(crate) fn whole<'py>(value: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    if value.is_exact_instance_of::<PyInt>() {
        return Some(value.clone());
    }
    if value.is_instance_of::<PyBool>() { None } else { value.call_method0("__index__").ok() }
}

/// A plain int from 0 that 32 bits hold: nearly every token id, read without calling into Python.
pub(crate) fn plain(value: &Bound<'_, PyAny>) -> Option<u32> {
    if value.is_exact_instance_of::<PyInt>() { value.extract().ok() } else { None }
}

/// The number of items of a sequence of numbers: something with a length and an order, but no text and no
/// mapping. `None` for anything else.
pub(crate) fn sequence_len(value: &Bound<'_, PyAny>) -> Option<usize> {
    if let Ok(list) = value.cast_exact::<PyList>() {
        return Some(list.len());
    }
    let text = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>();
    if text || value.is_instance_of::<PyDict>() || !value.hasattr("__getitem__").unwrap_or(false) {
        return None;
    }
    value.len().ok()
}
