//! The one place where errors of the core become Python exceptions.

use neuron_sched_core::error::Error;
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};

/// The exception that a Python programmer expects for `error`.
pub(crate) fn to_py(error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Invalid(_)
        | Error::Row { .. }
        | Error::PromptTooLong { .. }
        | Error::NeverFits { .. }
        | Error::NotDue(_) => PyValueError::new_err(text),
        Error::Violation(_) | Error::Broken(_) => PyRuntimeError::new_err(text),
    }
}

/// As [`to_py`], naming the request that was refused.
pub(crate) fn of_request(id: &str, error: &Error) -> PyErr {
    match error {
        Error::PromptTooLong { .. } | Error::NeverFits { .. } | Error::Invalid(_) => {
            PyValueError::new_err(format!("request '{id}': {error}"))
        }
        Error::Row { .. } | Error::NotDue(_) | Error::Violation(_) | Error::Broken(_) => to_py(error),
    }
}
