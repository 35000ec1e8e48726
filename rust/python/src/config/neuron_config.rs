//! `NeuronConfig`, derived from the core's declaration of the fields.

use neuron_sched_core::config::{Config, FIELDS, RawConfig};
use neuron_sched_core::config_fields;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use super::field::ConfigField;
use super::read::Reader;
use super::value::ToPython;
use crate::error::to_py;

/// Text of a parameter in a signature: its name, and `=None` if it may be left out.
macro_rules! parameter {
    ($name:ident, Required) => {
        stringify!($name)
    };
    ($name:ident, $default:ident) => {
        concat!(stringify!($name), "=None")
    };
}

macro_rules! define_neuron_config {
    ($(
        #[doc = $meaning:literal]
        $name:ident: $value:ty
            = $kind:ident $(($least:literal))?, $default:ident $(($given:literal))?, $source:ident $(($flag:literal))?;
    )+) => {
        // CPython takes the signature from the first line. The signature that pyo3 generates shows every field as
        // optional: `new` accepts a missing required field, to report it together with all other faults.
        #[allow(clippy::doc_markdown, reason = "the signature is not Markdown")]
        #[doc = concat!("NeuronConfig(*", $(", ", parameter!($name, $default),)+ ")\n--\n\n")]
        /// Checked, immutable configuration of `BucketScheduler`.
        ///
        /// `None` selects the default of a field. One `ValueError` lists all faults, one per line, each with the field,
        /// its value and the expectation.
        #[pyclass(frozen, eq, module = "neuron_sched")]
        #[derive(Clone, PartialEq)]
        pub(crate) struct NeuronConfig {
            inner: Config,
        }

        #[pymethods]
        impl NeuronConfig {
            #[new]
            #[pyo3(signature = (*, $($name = None),+), text_signature = None)]
            #[allow(clippy::too_many_arguments, reason = "one argument per field")]
            fn new($($name: Option<&Bound<'_, PyAny>>),+) -> PyResult<Self> {
                let mut reader = Reader::new();
                let mut raw = RawConfig {
                    $($name: reader.read(stringify!($name), $name),)+
                    faults: Vec::new(),
                };
                raw.faults = reader.into_faults();
                Config::resolve(&raw).map(|inner| Self { inner }).map_err(|error| to_py(&error))
            }

            $(
                #[doc = $meaning]
                #[getter]
                fn $name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    self.inner.$name.to_python(py)
                }
            )+

            /// Return all fields by name, with defaults filled in.
            fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let dict = PyDict::new(py);
                $(dict.set_item(stringify!($name), self.inner.$name.to_python(py)?)?;)+
                Ok(dict)
            }

            /// Descriptions of all fields, in the order of `as_dict`.
            #[classattr]
            #[pyo3(name = "FIELDS")]
            fn fields(py: Python<'_>) -> PyResult<Py<PyTuple>> {
                let fields: Vec<ConfigField> = FIELDS.iter().map(ConfigField::new).collect();
                Ok(PyTuple::new(py, fields)?.unbind())
            }

            fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
                Ok((PyTuple::empty(py), self.as_dict(py)?))
            }

            fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
                PyString::new(py, &self.__repr__(py)?).hash()
            }

            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                let fields: Vec<String> = self
                    .as_dict(py)?
                    .iter()
                    .map(|(name, value)| Ok(format!("{name}={}", value.repr()?)))
                    .collect::<PyResult<_>>()?;
                Ok(format!("NeuronConfig({})", fields.join(", ")))
            }
        }
    };
}

config_fields!(define_neuron_config);

impl NeuronConfig {
    /// Return the checked values.
    pub(crate) fn core(&self) -> &Config {
        &self.inner
    }
}
