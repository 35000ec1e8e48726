//! Token ids of a step as a caller gives them.

use neuron_sched_core::config::TOKENS_MAX;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::field::ids_of_array;
use super::value::{plain, sequence_len, shown, whole};

/// The tokens of a step of `rows` rows: one entry a row, an id or None. An entry too many is read, so that
/// it is refused, but no more.
pub(crate) fn read_tokens(tokens: &Bound<'_, PyAny>, rows: usize) -> PyResult<Vec<Option<u32>>> {
    let fault = |at: usize, token: &Bound<'_, PyAny>| {
        format!("tokens[{at}]: {}: expected a token id from 0 to {TOKENS_MAX}, or None", shown(token))
    };
    if sequence_len(tokens).is_none() {
        let expected = "a sequence with one entry a row, or None";
        return Err(PyTypeError::new_err(format!("tokens: {}: expected {expected}", shown(tokens))));
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
        if let Some(id) = plain(&token).filter(is_id) {
            read.push(Some(id));
            continue;
        }
        let number = whole(&token).ok_or_else(|| PyTypeError::new_err(fault(at, &token)))?;
        let id = number.extract().ok().filter(is_id);
        read.push(Some(id.ok_or_else(|| PyValueError::new_err(fault(at, &token)))?));
    }
    Ok(read)
}
