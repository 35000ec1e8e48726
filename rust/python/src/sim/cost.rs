//! `Cost`: durations of steps, given in milliseconds.

use neuron_sched_core::error::{Error, Fault};
use neuron_sched_core::sim;
use pyo3::prelude::*;
use pyo3::types::PyMapping;

use super::number::{units, within};
use crate::convert::display;
use crate::error::to_py;

/// Decimal places that convert milliseconds to nanoseconds.
const PLACES: u32 = 6;

/// Durations of a device's steps, in nanoseconds; internal to `neuron_sched.simulate`.
///
/// Arguments are in milliseconds, rounded half up.
#[pyclass(frozen, eq, module = "neuron_sched._native")]
#[derive(PartialEq)]
pub(crate) struct Cost {
    pub(super) inner: sim::Cost,
}

#[pymethods]
impl Cost {
    /// Return a cost with one duration for all prefill steps and one for all decode steps.
    #[staticmethod]
    fn constant(prefill_ms: &Bound<'_, PyAny>, decode_ms: &Bound<'_, PyAny>) -> PyResult<Self> {
        match (units("prefill_ms", prefill_ms, PLACES), units("decode_ms", decode_ms, PLACES)) {
            (Ok(prefill), Ok(decode)) => Ok(Self { inner: sim::Cost::constant(prefill, decode) }),
            (prefill, decode) => Err(refused(prefill.err(), decode.err())),
        }
    }

    /// Return a cost with durations by padded size, interpolated linearly.
    #[staticmethod]
    fn table(prefill: &Bound<'_, PyAny>, decode: &Bound<'_, PyAny>) -> PyResult<Self> {
        match (points("prefill", prefill), points("decode", decode)) {
            (Ok(prefill), Ok(decode)) => {
                sim::Cost::table(&prefill, &decode).map(|inner| Self { inner }).map_err(|error| to_py(&error))
            }
            (prefill, decode) => Err(refused(prefill.err(), decode.err())),
        }
    }
}

fn refused(first: Option<Fault>, second: Option<Fault>) -> PyErr {
    to_py(&Error::Invalid(first.into_iter().chain(second).collect()))
}

/// Read a mapping from sizes to milliseconds as sizes and nanoseconds. The core checks the range of the sizes.
fn points(field: &'static str, table: &Bound<'_, PyAny>) -> Result<Vec<(i64, u64)>, Fault> {
    let fault = || Fault::new(field, display(table), "a mapping of sizes to milliseconds");
    let items = table.cast::<PyMapping>().map_err(|_| fault())?.items().map_err(|_| fault())?;
    items
        .iter()
        .map(|item| {
            let (size, time): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract().map_err(|_| fault())?;
            Ok((within(field, &size, (i64::MIN, i64::MAX))?, units(field, &time, PLACES)?))
        })
        .collect()
}
