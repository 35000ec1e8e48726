//! `TokensArgument`: the `tokens` argument of a fill.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::convert::{display, read_tokens, sequence_len};

/// The `tokens` argument of a fill: token ids for decode rows with an unknown token.
pub(crate) enum TokensArgument<'py> {
    /// `None`.
    Omitted,
    /// A sequence with one entry per row.
    Sequence(Bound<'py, PyAny>),
    /// A function from the ids of the requests with an unknown token to their tokens.
    Callable(Bound<'py, PyAny>),
}

impl<'py> TokensArgument<'py> {
    /// Classify the argument.
    pub(crate) fn read(tokens: Option<&Bound<'py, PyAny>>) -> Self {
        let Some(tokens) = tokens.filter(|tokens| !tokens.is_none()) else { return Self::Omitted };
        let tokens = tokens.clone();
        if tokens.is_callable() { Self::Callable(tokens) } else { Self::Sequence(tokens) }
    }

    /// Check that the argument is not a sequence, for a step without unknown tokens; `why` ends the message.
    pub(crate) fn refuse_sequence(&self, why: &str) -> PyResult<()> {
        match self {
            Self::Sequence(tokens) => {
                Err(PyValueError::new_err(format!("tokens: {}: expected None: {why}", display(tokens))))
            }
            Self::Omitted | Self::Callable(_) => Ok(()),
        }
    }

    /// Return the tokens by row, `None` for a row without one.
    ///
    /// A callable is called with the `ids` at the batch positions that `unknown` returns; it is not called if there are
    /// none.
    pub(crate) fn resolve(
        &self,
        ids: &Bound<'py, PyTuple>,
        unknown: impl FnOnce() -> PyResult<Vec<usize>>,
    ) -> PyResult<Option<Vec<Option<u32>>>> {
        let rows = ids.len();
        let callable = match self {
            Self::Omitted => return Ok(None),
            Self::Sequence(tokens) => return entries(tokens, rows).map(Some),
            Self::Callable(callable) => callable,
        };
        let positions = unknown()?;
        if positions.is_empty() {
            return Ok(None);
        }
        let unknown_ids = positions.iter().map(|&at| ids.get_item(at)).collect::<PyResult<Vec<_>>>()?;
        let returned = callable.call1((PyList::new(ids.py(), unknown_ids)?,))?;
        if sequence_len(&returned).is_none() {
            let returned = display(&returned);
            return Err(PyTypeError::new_err(format!(
                "tokens: the callable returned {returned}: expected a sequence with one entry per id"
            )));
        }
        let returned = entries(&returned, positions.len())?;
        let mut tokens = vec![None; rows];
        for (at, token) in positions.into_iter().zip(returned) {
            tokens[at] = token;
        }
        Ok(Some(tokens))
    }
}

fn entries(tokens: &Bound<'_, PyAny>, rows: usize) -> PyResult<Vec<Option<u32>>> {
    let entries = read_tokens(tokens, rows)?;
    if entries.len() != rows {
        let count = if entries.len() > rows { tokens.len()? } else { entries.len() };
        return Err(PyValueError::new_err(format!("tokens: {count} entries: expected one for each of {rows} rows")));
    }
    Ok(entries)
}
