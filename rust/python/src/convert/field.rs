//! Conversion of the fields of a request or a row.

use std::fmt::{self, Display};
use std::ops::RangeInclusive;

use neuron_sched_core::config::TOKENS_MAX;
use neuron_sched_core::request::Sampling;
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use super::value::{as_int, as_small_int, display, sequence_len};

/// Maximum number of ids in one sequence: more than any model takes, and 256 MiB.
const IDS_MAX: usize = 1 << 26;

/// Reads fields of one object. Messages name the object before the field.
#[derive(Clone, Copy)]
pub(crate) enum FieldReader<'a> {
    /// An argument of the call; messages name the field only.
    Argument,
    /// A request, by id.
    Request(&'a str),
    /// A row, by position in `rows`.
    Row(usize),
}

impl Display for FieldReader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument => Ok(()),
            Self::Request(id) => write!(f, "request '{id}': "),
            Self::Row(at) => write!(f, "rows[{at}]."),
        }
    }
}

impl FieldReader<'_> {
    /// Return a `TypeError` for a value of the wrong type.
    pub(crate) fn type_error(&self, field: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
        PyTypeError::new_err(format!("{self}{field}: {}: expected {expected}", display(value)))
    }

    /// Return a `ValueError` for a bad value.
    pub(crate) fn value_error(&self, field: &str, value: &str, expected: &str) -> PyErr {
        PyValueError::new_err(format!("{self}{field}: {value}: expected {expected}"))
    }

    /// Read a whole number in `range`.
    pub(crate) fn count(&self, field: &str, value: &Bound<'_, PyAny>, range: RangeInclusive<i64>) -> PyResult<i64> {
        let expected = || format!("a whole number from {} to {}", range.start(), range.end());
        let Some(number) = as_int(value) else {
            return Err(self.type_error(field, value, &expected()));
        };
        let read = number.extract::<i64>().ok().filter(|count| range.contains(count));
        read.ok_or_else(|| self.value_error(field, &display(value), &expected()))
    }

    /// Read a number of tokens, an id or a position: a whole number from `least` to [`TOKENS_MAX`].
    pub(crate) fn number(&self, field: &str, value: &Bound<'_, PyAny>, least: u32) -> PyResult<u32> {
        if let Some(number) = as_small_int(value).filter(|number| (least..=TOKENS_MAX).contains(number)) {
            return Ok(number);
        }
        let number = self.count(field, value, least.into()..=TOKENS_MAX.into())?;
        Ok(u32::try_from(number).expect("in range"))
    }

    /// Read a bool.
    pub(crate) fn flag(&self, field: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        value.extract().map_err(|_| self.type_error(field, value, "True or False"))
    }

    /// Read `top_k`.
    pub(crate) fn top_k(&self, value: &Bound<'_, PyAny>) -> PyResult<i64> {
        self.count("top_k", value, -1..=TOKENS_MAX.into())
    }

    /// Read `top_p`.
    pub(crate) fn top_p(&self, value: &Bound<'_, PyAny>) -> PyResult<f64> {
        self.real("top_p", value, "a number above 0, at most 1", |p| single(p) > 0.0 && p <= 1.0)
    }

    /// Read `temperature`.
    pub(crate) fn temperature(&self, value: &Bound<'_, PyAny>) -> PyResult<f64> {
        self.real("temperature", value, "a finite number from 0", |t| t >= 0.0 && single(t).is_finite())
    }

    fn real(
        &self,
        field: &str,
        value: &Bound<'_, PyAny>,
        expected: &str,
        is_valid: impl Fn(f64) -> bool,
    ) -> PyResult<f64> {
        // numpy.float32 is not a float, but has `__float__`.
        let number = as_int(value).is_some() || value.hasattr("__float__").unwrap_or(false);
        if !number || value.is_instance_of::<PyBool>() {
            return Err(self.type_error(field, value, expected));
        }
        let read = value.extract::<f64>().ok().filter(|&real| is_valid(real));
        read.ok_or_else(|| self.value_error(field, &display(value), expected))
    }

    /// Read token ids or block ids from a sequence or a one-dimensional array; `expected` is the text of a `TypeError`.
    pub(crate) fn ids(&self, field: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyResult<Vec<u32>> {
        let count = sequence_len(value).ok_or_else(|| self.type_error(field, value, expected))?;
        if count > IDS_MAX {
            return Err(self.value_error(field, &format!("{count} ids"), &format!("at most {IDS_MAX}")));
        }
        if let Some(ids) = ids_of_array(value) {
            return Ok(ids);
        }
        let mut ids = Vec::with_capacity(count);
        // At most `count` items: an iterator of a custom class may yield more than its length, or never end.
        for (at, item) in value.try_iter()?.enumerate().take(count) {
            let item = item?;
            let Some(id) = as_small_int(&item).filter(|&id| id <= TOKENS_MAX) else {
                ids.push(self.number(&format!("{field}[{at}]"), &item, 0)?);
                continue;
            };
            ids.push(id);
        }
        Ok(ids)
    }
}

/// Return the sampling parameters as the tensors store them. As in vLLM, 0 for `top_k` is off, which the tensors store
/// as -1.
#[allow(clippy::cast_precision_loss, reason = "no vocabulary has 2^24 tokens")]
pub(crate) fn sampling(top_k: i64, top_p: f64, temperature: f64) -> Sampling {
    let top_k = if top_k == 0 { -1.0 } else { top_k as f32 };
    Sampling { top_k, top_p: single(top_p), temperature: single(temperature) }
}

#[allow(clippy::cast_possible_truncation, reason = "the tensor is of float32")]
fn single(real: f64) -> f32 {
    real as f32
}

/// Return the ids of a one-dimensional numpy array. `None` if an id is out of range, or for an array of another type or
/// layout: the caller then reads it item by item.
pub(crate) fn ids_of_array(value: &Bound<'_, PyAny>) -> Option<Vec<u32>> {
    from_array::<i32>(value).or_else(|| from_array::<i64>(value)).or_else(|| from_array::<u32>(value))
}

fn from_array<T: Element + Copy + TryInto<u32>>(value: &Bound<'_, PyAny>) -> Option<Vec<u32>> {
    // The strides of a field in a structured array may not be multiples of the item size; such an array is not aligned.
    let array = value.cast::<PyArray1<T>>().ok().filter(|array| array.is_aligned())?.try_readonly().ok()?;
    let items = array.as_array();
    let mut ids = Vec::with_capacity(items.len());
    for &item in items {
        ids.push(item.try_into().ok().filter(|&id| id <= TOKENS_MAX)?);
    }
    Some(ids)
}
