//! Conversion of the token ids of a step.

use neuron_sched_core::config::TOKENS_MAX;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::field::ids_of_array;
use super::value::{as_int, as_small_int, display, sequence_len};

/// Return the tokens of a step of `rows` rows: one entry per row, an id or `None`. At most one extra entry is read, so
/// that the caller can refuse a longer sequence by its length.
pub(crate) fn read_tokens(tokens: &Bound<'_, PyAny>, rows: usize) -> PyResult<Vec<Option<u32>>> {
    let fault = |at: usize, token: &Bound<'_, PyAny>| {
        format!("tokens[{at}]: {}: expected a token id from 0 to {TOKENS_MAX}, or None", display(token))
    };
    if sequence_len(tokens).is_none() {
        let expected = "a sequence with one entry per row, or None";
        return Err(PyTypeError::new_err(format!("tokens: {}: expected {expected}", display(tokens))));
    }
    if let Some(ids) = ids_of_array(tokens) {
        return Ok(ids.into_iter().take(rows + 1).map(Some).collect());
    }
    let mut read = Vec::with_capacity(rows);
    for (at, token) in tokens.try_iter()?.enumerate().take(rows + 1) {
        let token = token?;
        if token.is_none() {
            read.push(None);
            continue;
        }
        let is_id = |id: &u32| *id <= TOKENS_MAX;
        if let Some(id) = as_small_int(&token).filter(is_id) {
            read.push(Some(id));
            continue;
        }
        let number = as_int(&token).ok_or_else(|| PyTypeError::new_err(fault(at, &token)))?;
        let id = number.extract().ok().filter(is_id);
        read.push(Some(id.ok_or_else(|| PyValueError::new_err(fault(at, &token)))?));
    }
    Ok(read)
}
