//! Conversion of a caller's rows: objects with the attributes of `PrefillRow` or `DecodeRow`.

use neuron_sched_core::error::Error;
use neuron_sched_core::fill::{self, Shape};
use neuron_sched_core::request::Sampling;
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::convert::{FieldReader, display, sampling, sequence_len};
use crate::error::to_py;

/// The values of a `PrefillRow`.
pub(super) struct PrefillRow {
    tokens: Vec<u32>,
    start: u32,
    blocks: Vec<u32>,
    sampling: Sampling,
    /// Whether the row ends its prompt.
    pub(super) emits: bool,
}

impl PrefillRow {
    pub(super) fn read(reader: FieldReader<'_>, row: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self {
            tokens: reader.ids(
                "token_ids",
                &row.getattr(intern!(row.py(), "token_ids"))?,
                "a sequence of token ids",
            )?,
            start: reader.number("start", &row.getattr(intern!(row.py(), "start"))?, 0)?,
            blocks: reader.ids(
                "block_ids",
                &row.getattr(intern!(row.py(), "block_ids"))?,
                "a sequence of block ids",
            )?,
            sampling: read_sampling(reader, row)?,
            emits: reader.flag("emits", &row.getattr(intern!(row.py(), "emits"))?)?,
        })
    }

    /// Return the row for the core.
    pub(super) fn borrow(&self) -> fill::PrefillRow<'_> {
        let Self { tokens, start, blocks, sampling, emits: _ } = self;
        fill::PrefillRow { tokens, start: *start, blocks, sampling: *sampling }
    }
}

/// The values of a `DecodeRow`.
pub(super) struct DecodeRow {
    token: u32,
    position: u32,
    blocks: Vec<u32>,
    sampling: Sampling,
    drafts: u32,
}

impl DecodeRow {
    pub(super) fn read(reader: FieldReader<'_>, row: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self {
            token: reader.number("token_id", &row.getattr(intern!(row.py(), "token_id"))?, 0)?,
            position: reader.number("position", &row.getattr(intern!(row.py(), "position"))?, 0)?,
            blocks: reader.ids(
                "block_ids",
                &row.getattr(intern!(row.py(), "block_ids"))?,
                "a sequence of block ids",
            )?,
            sampling: read_sampling(reader, row)?,
            drafts: reader.number("draft_tokens", &row.getattr(intern!(row.py(), "draft_tokens"))?, 0)?,
        })
    }

    /// Return the row for the core.
    pub(super) fn borrow(&self) -> fill::DecodeRow<'_> {
        let Self { token, position, blocks, sampling, drafts } = self;
        fill::DecodeRow { token: *token, position: *position, blocks, sampling: *sampling, drafts: *drafts }
    }
}

fn read_sampling(reader: FieldReader<'_>, row: &Bound<'_, PyAny>) -> PyResult<Sampling> {
    let top_k = reader.top_k(&row.getattr(intern!(row.py(), "top_k"))?)?;
    let top_p = reader.top_p(&row.getattr(intern!(row.py(), "top_p"))?)?;
    Ok(sampling(top_k, top_p, reader.temperature(&row.getattr(intern!(row.py(), "temperature"))?)?))
}

/// Read a list of rows, and return the rows and their request ids.
///
/// `class` is the expected class, for messages. `fits` checks the number of rows before any row is read.
pub(super) fn read_rows<R>(
    rows: &Bound<'_, PyAny>,
    class: &str,
    fits: impl Fn(usize) -> Result<Shape, Error>,
    read: impl Fn(FieldReader<'_>, &Bound<'_, PyAny>) -> PyResult<R>,
) -> PyResult<(Vec<R>, Py<PyTuple>)> {
    let py = rows.py();
    let type_error = || PyTypeError::new_err(format!("rows: {}: expected a list of rows", display(rows)));
    let count = sequence_len(rows).ok_or_else(type_error)?;
    fits(count).map_err(|error| to_py(&error))?;
    let items = rows.try_iter().map_err(|_| type_error())?.take(count).collect::<PyResult<Vec<_>>>()?;
    let mut ids = Vec::with_capacity(items.len());
    let mut values = Vec::with_capacity(items.len());
    for (at, row) in items.iter().enumerate() {
        let reader = FieldReader::Row(at);
        let value = read(reader, row).map_err(|error| {
            if !error.is_instance_of::<PyAttributeError>(py) {
                return error;
            }
            let type_error = PyTypeError::new_err(format!("rows[{at}]: {}: expected a {class}", display(row)));
            type_error.set_cause(py, Some(error));
            type_error
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
