//! Conversion of core errors to Python exceptions; no other module chooses an exception type for a core error.

use neuron_sched_core::error::Error;
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};

/// Return the Python exception for `error`: `ValueError` for a caller's mistake, `RuntimeError` for a bug.
pub(crate) fn to_py(error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Invalid(_)
        | Error::Row { .. }
        | Error::PromptTooLong { .. }
        | Error::NeverFits { .. }
        | Error::NotDue(_) => PyValueError::new_err(text),
        Error::BadStep(_) | Error::InvariantViolated(_) => PyRuntimeError::new_err(text),
    }
}

/// Return the Python exception for `error`, with the id of the refused request in its message.
pub(crate) fn of_request(id: &str, error: &Error) -> PyErr {
    match error {
        Error::PromptTooLong { .. } | Error::NeverFits { .. } | Error::Invalid(_) => {
            PyValueError::new_err(format!("request '{id}': {error}"))
        }
        Error::Row { .. } | Error::NotDue(_) | Error::BadStep(_) | Error::InvariantViolated(_) => to_py(error),
    }
}
