//! Display of Python values in messages, and conversion to whole numbers.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyInt, PyList, PyString};

/// Maximum length of a value in a message, in characters; a longer one is truncated.
const DISPLAY_MAX: usize = 80;

/// Return the `repr` of `value`, truncated to `DISPLAY_MAX` characters; its type if `repr` raises.
pub(crate) fn display(value: &Bound<'_, PyAny>) -> String {
    let Ok(printed) = value.repr() else {
        return value.get_type().name().map_or_else(|_| "?".to_owned(), |name| format!("<{name}>"));
    };
    let printed = printed.to_string();
    if printed.chars().count() <= DISPLAY_MAX {
        return printed;
    }
    printed.chars().take(DISPLAY_MAX).chain("...".chars()).collect()
}

/// Return `value` as an int of any size: an int, or an object with `__index__` (such as `numpy.int64`), but not a bool.
pub(crate) fn as_int<'py>(value: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    if value.is_exact_instance_of::<PyInt>() {
        return Some(value.clone());
    }
    if value.is_instance_of::<PyBool>() { None } else { value.call_method0("__index__").ok() }
}

/// Return an int from 0 to 2^32 - 1 without running Python code; `None` for any other value. Nearly every token id is
/// read this way.
pub(crate) fn as_small_int(value: &Bound<'_, PyAny>) -> Option<u32> {
    if value.is_exact_instance_of::<PyInt>() { value.extract().ok() } else { None }
}

/// Return the number of items of a sequence: an object with a length and `__getitem__`, but not text, bytes or a dict.
/// `None` for anything else.
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
