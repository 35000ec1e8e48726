//! `Request`: a request to queue, and `RequestState`: a snapshot of its state.

use neuron_sched_core::exclusive::{NewRequest, RequestView, Status};
use neuron_sched_core::request::{Prompt, UNKNOWN_TOKEN};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

use crate::convert::{FieldReader, as_int, display, sampling};

/// An immutable request for `BucketScheduler`.
///
/// `prompt` is a number of tokens, or the token ids; prefix caching needs the ids. The request finishes after
/// `max_tokens` output tokens, capped at `max(1, max_model_len - prompt)`, or with an output token of `stop_token_ids`.
/// The scheduler ignores `top_k`, `top_p` and `temperature`; they are copied to `Batch.sampling_params`.
///
/// Raise `TypeError` or `ValueError` with the name of the field for a bad value.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Request {
    /// Id of the request, unique among the live requests of a scheduler.
    #[pyo3(get)]
    id: Py<PyString>,
    prompt: Prompt,
    /// Maximum number of output tokens, as given.
    #[pyo3(get)]
    max_tokens: u32,
    /// Priority under policy `"priority"`; the lowest number is admitted first.
    #[pyo3(get)]
    priority: i64,
    stop_token_ids: Box<[u32]>,
    /// Sampling parameter `top_k`; -1 (default) and 0 are off.
    #[pyo3(get)]
    top_k: i64,
    /// Sampling parameter `top_p`, above 0 and at most 1; 1 (default) is off.
    #[pyo3(get)]
    top_p: f64,
    /// Sampling temperature; 0 (default) is greedy.
    #[pyo3(get)]
    temperature: f64,
}

impl Request {
    /// Return the id, and the request for the core.
    pub(crate) fn parts(&self, py: Python<'_>) -> (Py<PyString>, NewRequest) {
        let request = NewRequest {
            prompt: self.prompt.clone(),
            max_tokens: self.max_tokens,
            priority: self.priority,
            stop_token_ids: self.stop_token_ids.clone(),
            sampling: sampling(self.top_k, self.top_p, self.temperature),
        };
        (self.id.clone_ref(py), request)
    }
}

#[pymethods]
impl Request {
    #[new]
    #[pyo3(
        signature = (id, prompt, max_tokens, *, priority=None, stop_token_ids=None, top_k=None, top_p=None, temperature=None),
        text_signature = "(id, prompt, max_tokens, *, priority=0, stop_token_ids=(), top_k=-1, top_p=1.0, temperature=0.0)"
    )]
    #[allow(clippy::too_many_arguments, reason = "one argument per field")]
    fn new(
        id: &Bound<'_, PyAny>,
        prompt: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        priority: Option<&Bound<'_, PyAny>>,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        top_k: Option<&Bound<'_, PyAny>>,
        top_p: Option<&Bound<'_, PyAny>>,
        temperature: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = id.py();
        let Ok(string) = id.cast::<PyString>() else {
            return Err(PyTypeError::new_err(format!("id: {}: expected a string", display(id))));
        };
        let Ok(text) = string.to_str() else {
            return Err(PyValueError::new_err(format!("id: {}: expected a string without surrogates", display(id))));
        };
        // An exact str: methods of a subclass could run Python code while the scheduler is locked.
        let id = PyString::new(py, text).unbind();
        let reader = FieldReader::Request(text);
        Ok(Self {
            id,
            prompt: read_prompt(reader, prompt)?,
            max_tokens: reader.number("max_tokens", max_tokens, 1)?,
            priority: priority.map_or(Ok(0), |value| reader.count("priority", value, i64::MIN..=i64::MAX))?,
            stop_token_ids: stop_token_ids
                .map_or_else(|| Ok(Vec::new()), |ids| reader.ids("stop_token_ids", ids, "a sequence of token ids"))?
                .into(),
            top_k: top_k.map_or(Ok(-1), |value| reader.top_k(value))?,
            top_p: top_p.map_or(Ok(1.0), |value| reader.top_p(value))?,
            temperature: temperature.map_or(Ok(0.0), |value| reader.temperature(value))?,
        })
    }

    /// Number of prompt tokens, or a new list of the prompt's token ids.
    #[getter]
    fn prompt<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.prompt {
            Prompt::Tokens(ids) => Ok(PyList::new(py, ids.iter())?.into_any()),
            Prompt::Length(length) | Prompt::Segments { length, .. } => Ok(length.into_pyobject(py)?.into_any()),
        }
    }

    /// Token ids that finish the request when one is emitted.
    #[getter]
    fn stop_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.stop_token_ids.iter())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let id = self.id.bind(py).repr()?;
        Ok(format!("Request({id}, prompt={}, max_tokens={})", self.prompt(py)?.repr()?, self.max_tokens))
    }
}

fn read_prompt(reader: FieldReader<'_>, value: &Bound<'_, PyAny>) -> PyResult<Prompt> {
    if as_int(value).is_some() {
        return reader.number("prompt", value, 1).map(Prompt::Length);
    }
    let ids = reader.ids("prompt", value, "a number of tokens, or a sequence of token ids")?;
    if ids.is_empty() {
        return Err(reader.value_error("prompt", "no tokens", "at least one token"));
    }
    Ok(Prompt::Tokens(ids.into()))
}

/// A snapshot of a request, as of the last completed step.
#[pyclass(frozen, get_all, module = "neuron_sched")]
pub(crate) struct RequestState {
    /// Id of the request.
    id: Py<PyString>,
    /// `"waiting"`, `"prefill"`, `"decode"`, `"finished"` or `"cancelled"`.
    status: &'static str,
    /// `"length"` or `"stop"` for a finished request, else `None`.
    finish_reason: Option<&'static str>,
    /// Number of prompt tokens.
    num_prompt_tokens: usize,
    /// Number of tokens with computed KV entries.
    num_computed_tokens: u32,
    /// Output token ids; `None` for a token that was not passed to `complete`.
    output_token_ids: Vec<Option<u32>>,
    /// Allocated KV blocks, in order of position.
    block_ids: Vec<u32>,
}

impl RequestState {
    /// Return a snapshot of `view`.
    pub(crate) fn new(id: Py<PyString>, view: &RequestView<'_>) -> Self {
        let (status, finish_reason) = match view.status {
            Status::Waiting => ("waiting", None),
            Status::Prefill => ("prefill", None),
            Status::Decode => ("decode", None),
            Status::Finished(finish) => ("finished", Some(finish.name())),
            Status::Cancelled => ("cancelled", None),
        };
        let known = view.outputs.iter().map(|&id| (id != UNKNOWN_TOKEN).then_some(id));
        let output_token_ids = known.chain(std::iter::repeat(None)).take(view.generated as usize).collect();
        Self {
            id,
            status,
            finish_reason,
            num_prompt_tokens: view.prompt.len(),
            num_computed_tokens: view.computed,
            output_token_ids,
            block_ids: view.blocks.to_vec(),
        }
    }
}

#[pymethods]
impl RequestState {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { status, num_computed_tokens, .. } = self;
        let (id, outputs) = (self.id.bind(py).repr()?, self.output_token_ids.len());
        Ok(format!(
            "RequestState(id={id}, status='{status}', num_computed_tokens={num_computed_tokens}, {outputs} outputs)"
        ))
    }
}
