//! The fields of a request or a row as Python gives them, each fault named.

use std::fmt::{self, Display};
use std::ops::RangeInclusive;

use neuron_sched_core::config::TOKENS_MAX;
use neuron_sched_core::request::Sampling;
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use super::value::{plain, sequence_len, shown, whole};

/// Most ids of one sequence: more than any model takes, and a quarter of a gigabyte.
const IDS_MAX: usize = 1 << 26;

/// Reads the fields of somebody, whom its messages name.
#[derive(Clone, Copy)]
pub(crate) enum Read<'a> {
    /// The call itself.
    Argument,
    Request(&'a str),
    /// A row by its place in `rows`.
    Row(usize),
}

impl Display for Read<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument => Ok(()),
            Self::Request(id) => write!(f, "request '{id}': "),
            Self::Row(at) => write!(f, "rows[{at}]."),
        }
    }
}

impl Read<'_> {
    pub(crate) fn type_error(&self, field: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
        PyTypeError::new_err(format!("{self}{field}: {}: expected {expected}", shown(value)))
    }

    pub(crate) fn value_error(&self, field: &str, value: &str, expected: &str) -> PyErr {
        PyValueError::new_err(format!("{self}{field}: {value}: expected {expected}"))
    }

    pub(crate) fn count(&self, field: &str, value: &Bound<'_, PyAny>, range: RangeInclusive<i64>) -> PyResult<i64> {
        let expected = || format!("a whole number from {} to {}", range.start(), range.end());
        let Some(number) = whole(value) else {
            return Err(self.type_error(field, value, &expected()));
        };
        let read = number.extract::<i64>().ok().filter(|count| range.contains(count));
        read.ok_or_else(|| self.value_error(field, &shown(value), &expected()))
    }

    /// A count of tokens, an id or a position.
    pub(crate) fn number(&self, field: &str, value: &Bound<'_, PyAny>, least: u32) -> PyResult<u32> {
        if let Some(number) = plain(value).filter(|number| (least..=TOKENS_MAX).contains(number)) {
            return Ok(number);
        }
        let number = self.count(field, value, least.into()..=TOKENS_MAX.into())?;
        Ok(u32::try_from(number).expect("in range"))
    }

    pub(crate) fn flag(&self, field: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        value.extract().map_err(|_| self.type_error(field, value, "True or False"))
    }

    pub(crate) fn top_k(&self, value: &Bound<'_, PyAny>) -> PyResult<i64> {
        self.count("top_k", value, -1..=TOKENS_MAX.into())
    }

    pub(crate) fn top_p(&self, value: &Bound<'_, PyAny>) -> PyResult<f64> {
        self.real("top_p", value, "a number above 0, at most 1", |p| single(p) > 0.0 && p <= 1.0)
    }

    pub(crate) fn temperature(&self, value: &Bound<'_, PyAny>) -> PyResult<f64> {
        self.real("temperature", value, "a finite number from 0", |t| t >= 0.0 && single(t).is_finite())
    }

    fn real(
        &self,
        field: &str,
        value: &Bound<'_, PyAny>,
        expected: &str,
        right: impl Fn(f64) -> bool,
    ) -> PyResult<f64> {
        // numpy.float32 is no float, but says that it is a number.
        let number = whole(value).is_some() || value.hasattr("__float__").unwrap_or(false);
        if !number || value.is_instance_of::<PyBool>() {
            return Err(self.type_error(field, value, expected));
        }
        let read = value.extract::<f64>().ok().filter(|&real| right(real));
        read.ok_or_else(|| self.value_error(field, &shown(value), expected))
    }

    /// Ids in a sequence or an array of one dimension; `expected` says what of.
    pub(crate) fn ids(&self, field: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyResult<Vec<u32>> {
        let count = sequence_len(value).ok_or_else(|| self.type_error(field, value, expected))?;
        if count > IDS_MAX {
            return Err(self.value_error(field, &format!("{count} ids"), &format!("at most {IDS_MAX}")));
        }
        if let Some(ids) = ids_of_array(value) {
            return Ok(ids);
        }
        let mut ids = Vec::with_capacity(count);
        // No further than its length, whatever its iterator would go on to give.
        for (at, item) in value.try_iter()?.enumerate().take(count) {
            let item = item?;
            let Some(id) = plain(&item).filter(|&id| id <= TOKENS_MAX) else {
                ids.push(self.number(&format!("{field}[{at}]"), &item, 0)?);
                continue;
            };
            ids.push(id);
        }
        Ok(ids)
    }
}

/// What is asked of the sampler, as the tensors have it: 0 for `top_k` means all, as it does to vLLM.
#[allow(clippy::cast_precision_loss, reason = "no vocabulary has 2^24 tokens")]
pub(crate) fn sampling(top_k: i64, top_p: f64, temperature: f64) -> Sampling {
    let top_k = if top_k == 0 { -1.0 } else { top_k as f32 };
    Sampling { top_k, top_p: single(top_p), temperature: single(temperature) }
}

#[allow(clippy::cast_possible_truncation, reason = "the tensor is of float32")]
fn single(real: f64) -> f32 {
    real as f32
}

/// The ids of an array, unless there is a wrong one among them or it is laid out as numbers rarely are; then it is read
/// item by item.
pub(crate) fn ids_of_array(value: &Bound<'_, PyAny>) -> Option<Vec<u32>> {
    from_array::<i32>(value).or_else(|| from_array::<i64>(value)).or_else(|| from_array::<u32>(value))
}

fn from_array<T: Element + Copy + TryInto<u32>>(value: &Bound<'_, PyAny>) -> Option<Vec<u32>> {
    // Aligned means strides too: one of a field in the middle of records is none of whole numbers.
    let array = value.cast::<PyArray1<T>>().ok().filter(|array| array.is_aligned())?.try_readonly().ok()?;
    let items = array.as_array();
    let mut ids = Vec::with_capacity(items.len());
    for &item in items {
        ids.push(item.try_into().ok().filter(|&id| id <= TOKENS_MAX)?);
    }
    Some(ids)
}
