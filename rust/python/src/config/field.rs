//! `ConfigField`: the description of one field of `NeuronConfig`.

use neuron_sched_core::config::{Field, FieldDefault, FieldKind, Source};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The description of one field of `NeuronConfig`.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct ConfigField {
    field: &'static Field,
}

impl ConfigField {
    pub(super) fn new(field: &'static Field) -> Self {
        Self { field }
    }
}

#[pymethods]
impl ConfigField {
    /// Name of the field in every interface.
    #[getter]
    fn name(&self) -> &'static str {
        self.field.name
    }

    /// Kind of its values: `"count"`, `"sizes"`, `"choice"`, `"flag"` or `"costs"`.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.field.kind {
            FieldKind::Count(_) => "count",
            FieldKind::Sizes => "sizes",
            FieldKind::Choice => "choice",
            FieldKind::Flag => "flag",
            FieldKind::Costs => "costs",
        }
    }

    /// Smallest value of a count; `None` for other kinds.
    #[getter]
    fn minimum(&self) -> Option<u32> {
        if let FieldKind::Count(least) = self.field.kind { Some(least) } else { None }
    }

    /// Names that a choice takes, the default first; empty for other kinds.
    #[getter]
    fn choices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.field.choices)
    }

    /// Whether the field must be given.
    #[getter]
    fn required(&self) -> bool {
        self.field.default == FieldDefault::Required
    }

    /// Default as text; `None` for a required field.
    #[getter]
    fn default(&self) -> Option<String> {
        match self.field.default {
            FieldDefault::Required => None,
            FieldDefault::Number(number) => Some(number.to_string()),
            FieldDefault::Off => Some("off".to_owned()),
            FieldDefault::Name(text) | FieldDefault::Unset(text) | FieldDefault::Derived(text) => Some(text.to_owned()),
        }
    }

    /// Meaning of the field, in one sentence.
    #[getter]
    fn meaning(&self) -> &'static str {
        self.field.meaning
    }

    /// vLLM flag that sets the field; `None` if `additional_config["neuron_config"]` does.
    #[getter]
    fn vllm_flag(&self) -> Option<&'static str> {
        match self.field.source {
            Source::NeuronConfig => None,
            Source::VllmFlag(flag) => Some(flag),
        }
    }

    fn __repr__(&self) -> String {
        format!("<ConfigField {}>", self.field.name)
    }
}
