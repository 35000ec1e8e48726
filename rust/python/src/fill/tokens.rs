//! Token ids that a caller of a fill hands in, where nobody else knows them yet.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::convert::read_tokens;
use crate::convert::{sequence_len, shown};

/// What was given as `tokens`.
pub(crate) enum Given<'py> {
    Nothing,
    /// One entry a row.
    List(Bound<'py, PyAny>),
    /// Is asked for those that are not known.
    Callable(Bound<'py, PyAny>),
}

impl<'py> Given<'py> {
    pub(crate) fn read(tokens: Option<&Bound<'py, PyAny>>) -> Self {
        let Some(tokens) = tokens.filter(|tokens| !tokens.is_none()) else { return Self::Nothing };
        let tokens = tokens.clone();
        if tokens.is_callable() { Self::Callable(tokens) } else { Self::List(tokens) }
    }

    /// Refuses a list where all is known.
    pub(crate) fn refuse_list(&self, why: &str) -> PyResult<()> {
        match self {
            Self::List(tokens) => {
                Err(PyValueError::new_err(format!("tokens: {}: expected None: {why}", shown(tokens))))
            }
            Self::Nothing | Self::Callable(_) => Ok(()),
        }
    }

    /// The entries by row, `None` where there is none. A callable is asked for the rows at the positions that
    /// `unknown` answers, by their names; it is not called when there are none.
    pub(crate) fn resolve(
        &self,
        names: &Bound<'py, PyTuple>,
        unknown: impl FnOnce() -> PyResult<Vec<usize>>,
    ) -> PyResult<Option<Vec<Option<u32>>>> {
        let rows = names.len();
        let ask = match self {
            Self::Nothing => return Ok(None),
            Self::List(tokens) => return entries(tokens, rows).map(Some),
            Self::Callable(ask) => ask,
        };
        let places = unknown()?;
        if places.is_empty() {
            return Ok(None);
        }
        let asked = places.iter().map(|&at| names.get_item(at)).collect::<PyResult<Vec<_>>>()?;
        let told = ask.call1((PyList::new(names.py(), asked)?,))?;
        if sequence_len(&told).is_none() {
            let told = shown(&told);
            return Err(PyTypeError::new_err(format!(
                "tokens: the callable returned {told}: expected a sequence with one entry an id"
            )));
        }
        let told = entries(&told, places.len())?;
        let mut given = vec![None; rows];
        for (at, token) in places.into_iter().zip(told) {
            given[at] = token;
        }
        Ok(Some(given))
    }
}

fn entries(tokens: &Bound<'_, PyAny>, rows: usize) -> PyResult<Vec<Option<u32>>> {
    let entries = read_tokens(tokens, rows)?;
    if entries.len() != rows {
        let given = if entries.len() > rows { tokens.len()? } else { entries.len() };
        return Err(PyValueError::new_err(format!("tokens: {given} entries: expected one for each of {rows} rows")));
    }
    Ok(entries)
}
