//! Rows as callers with a scheduler of their own give them: whatever has the attributes of `PrefillRow` or `DecodeRow`.

use neuron_sched_core::error::Error;
use neuron_sched_core::fill::{self, Shape};
use neuron_sched_core::request::Sampling;
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::convert::{Read, sampling, sequence_len, shown};
use crate::error::to_py;

/// A `PrefillRow` as it was read.
pub(super) struct PrefillRow {
    tokens: Vec<u32>,
    start: u32,
    blocks: Vec<u32>,
    sampling: Sampling,
    /// Whether the prompt ends with these tokens.
    pub(super) emits: bool,
}

impl PrefillRow {
    pub(super) fn read(read: Read<'_>, row: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self {
            tokens: read.ids("token_ids", &row.getattr(intern!(row.py(), "token_ids"))?, "a sequence of token ids")?,
            start: read.number("start", &row.getattr(intern!(row.py(), "start"))?, 0)?,
            blocks: read.ids("block_ids", &row.getattr(intern!(row.py(), "block_ids"))?, "a sequence of block ids")?,
            sampling: read_sampling(read, row)?,
            emits: read.flag("emits", &row.getattr(intern!(row.py(), "emits"))?)?,
        })
    }

    pub(super) fn borrow(&self) -> fill::PrefillRow<'_> {
        let Self { tokens, start, blocks, sampling, emits: _ } = self;
        fill::PrefillRow { tokens, start: *start, blocks, sampling: *sampling }
    }
}

/// A `DecodeRow` as it was read.
pub(super) struct DecodeRow {
    token: u32,
    position: u32,
    blocks: Vec<u32>,
    sampling: Sampling,
    drafts: u32,
}

impl DecodeRow {
    pub(super) fn read(read: Read<'_>, row: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self {
            token: read.number("token_id", &row.getattr(intern!(row.py(), "token_id"))?, 0)?,
            position: read.number("position", &row.getattr(intern!(row.py(), "position"))?, 0)?,
            blocks: read.ids("block_ids", &row.getattr(intern!(row.py(), "block_ids"))?, "a sequence of block ids")?,
            sampling: read_sampling(read, row)?,
            drafts: read.number("draft_tokens", &row.getattr(intern!(row.py(), "draft_tokens"))?, 0)?,
        })
    }

    pub(super) fn borrow(&self) -> fill::DecodeRow<'_> {
        let Self { token, position, blocks, sampling, drafts } = self;
        fill::DecodeRow { token: *token, position: *position, blocks, sampling: *sampling, drafts: *drafts }
    }
}

fn read_sampling(read: Read<'_>, row: &Bound<'_, PyAny>) -> PyResult<Sampling> {
    let top_k = read.top_k(&row.getattr(intern!(row.py(), "top_k"))?)?;
    let top_p = read.top_p(&row.getattr(intern!(row.py(), "top_p"))?)?;
    Ok(sampling(top_k, top_p, read.temperature(&row.getattr(intern!(row.py(), "temperature"))?)?))
}

/// The rows of a list, which should be of `class`, and the names that they bear. `fits` refuses their number before any
/// is read.
pub(super) fn read_rows<R>(
    rows: &Bound<'_, PyAny>,
    class: &str,
    fits: impl Fn(usize) -> Result<Shape, Error>,
    read: impl Fn(Read<'_>, &Bound<'_, PyAny>) -> PyResult<R>,
) -> PyResult<(Vec<R>, Py<PyTuple>)> {
    let py = rows.py();
    let type_error = || PyTypeError::new_err(format!("rows: {}: expected a list of rows", shown(rows)));
    let count = sequence_len(rows).ok_or_else(type_error)?;
    fits(count).map_err(|error| to_py(&error))?;
    let items = rows.try_iter().map_err(|_| type_error())?.take(count).collect::<PyResult<Vec<_>>>()?;
    let mut ids = Vec::with_capacity(items.len());
    let mut values = Vec::with_capacity(items.len());
    for (at, row) in items.iter().enumerate() {
        let reader = Read::Row(at);
        let value = read(reader, row).map_err(|error| {
            if !error.is_instance_of::<PyAttributeError>(py) {
                return error;
            }
            let wrong = PyTypeError::new_err(format!("rows[{at}]: {}: expected a {class}", shown(row)));
            wrong.set_cause(py, Some(error));
            wrong
        });
        values.push(value?);
        let id = row.getattr(intern!(row.py(), "request_id"))?;
        if !id.is_none() && !id.is_instance_of::<PyString>() {
            return Err(reader.type_error("request_id", &id, "a string or None"));
        }
        ids.push(id);
    }
    Ok((values, PyTuple::new(py, ids)?.unbind()))
}
