//! Arguments that must be instances of a class.

use pyo3::PyTypeInfo;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::value::display;

/// Return `value` as an instance of `T`, or raise `TypeError` naming `argument`. The message of pyo3's own conversion
/// names the argument on Python 3.11 and newer only.
pub(crate) fn instance<'a, 'py, T: PyTypeInfo>(
    argument: &str,
    value: &'a Bound<'py, PyAny>,
) -> PyResult<&'a Bound<'py, T>> {
    value.cast::<T>().map_err(|_| {
        let class = T::type_object(value.py());
        let class = class.name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
        PyTypeError::new_err(format!("{argument}: {}: expected a {class}", display(value)))
    })
}
