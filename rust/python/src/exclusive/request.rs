//! `Request`: what a caller asks for, and `RequestState`: how it stands.

use neuron_sched_core::exclusive::{NewRequest, RequestView, Status};
use neuron_sched_core::request::{Prompt, UNKNOWN_TOKEN};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

use crate::convert::{Read, sampling, shown, whole};

/// A request for `BucketScheduler`; an immutable value.
///
/// `prompt` is a length in tokens, or the token ids themselves: those are needed to share KV blocks by content. At
/// most `max_tokens` tokens are emitted, capped at `max(1, max_model_len - prompt)`; an id of `stop_token_ids` ends
/// the request earlier.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Request {
    /// The name; no two live requests of a scheduler have the same.
    #[pyo3(get)]
    id: Py<PyString>,
    prompt: Prompt,
    /// Most tokens that it may emit, as given.
    #[pyo3(get)]
    max_tokens: u32,
    /// Lower numbers first, under policy `"priority"`.
    #[pyo3(get)]
    priority: i64,
    stop_token_ids: Box<[u32]>,
    /// For sampling in the engine; -1, the default, and 0 are off.
    #[pyo3(get)]
    top_k: i64,
    /// For sampling in the engine, above 0 and at most 1, the default.
    #[pyo3(get)]
    top_p: f64,
    /// For sampling in the engine; 0, the default, is greedy.
    #[pyo3(get)]
    temperature: f64,
}

impl Request {
    /// The name and what the core needs to know.
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
    #[allow(clippy::too_many_arguments, reason = "one argument a field")]
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
        let Ok(name) = id.cast::<PyString>() else {
            return Err(PyTypeError::new_err(format!("id: {}: expected a string", shown(id))));
        };
        let Ok(text) = name.to_str() else {
            return Err(PyValueError::new_err(format!("id: {}: expected a string of whole characters", shown(id))));
        };
        // A plain str: a subclass could run code of its own while the scheduler is locked.
        let id = PyString::new(py, text).unbind();
        let read = Read::Request(text);
        Ok(Self {
            id,
            prompt: read_prompt(read, prompt)?,
            max_tokens: read.number("max_tokens", max_tokens, 1)?,
            priority: priority.map_or(Ok(0), |value| read.count("priority", value, i64::MIN..=i64::MAX))?,
            stop_token_ids: stop_token_ids
                .map_or_else(|| Ok(Vec::new()), |ids| read.ids("stop_token_ids", ids, "a sequence of token ids"))?
                .into(),
            top_k: top_k.map_or(Ok(-1), |value| read.top_k(value))?,
            top_p: top_p.map_or(Ok(1.0), |value| read.top_p(value))?,
            temperature: temperature.map_or(Ok(0.0), |value| read.temperature(value))?,
        })
    }

    /// The length in tokens, or a new list of the token ids.
    #[getter]
    fn prompt<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.prompt {
            Prompt::Tokens(ids) => Ok(PyList::new(py, ids.iter())?.into_any()),
            Prompt::Length(length) | Prompt::Segments { length, .. } => Ok(length.into_pyobject(py)?.into_any()),
        }
    }

    /// Token ids that end the request when it emits one.
    #[getter]
    fn stop_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.stop_token_ids.iter())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let id = self.id.bind(py).repr()?;
        Ok(format!("Request({id}, prompt={}, max_tokens={})", self.prompt(py)?.repr()?, self.max_tokens))
    }
}

fn read_prompt(read: Read<'_>, value: &Bound<'_, PyAny>) -> PyResult<Prompt> {
    if whole(value).is_some() {
        return read.number("prompt", value, 1).map(Prompt::Length);
    }
    let ids = read.ids("prompt", value, "a number of tokens, or a sequence of token ids")?;
    if ids.is_empty() {
        return Err(read.value_error("prompt", "no tokens", "at least one token"));
    }
    Ok(Prompt::Tokens(ids.into()))
}

/// How a request stood when `BucketScheduler.request` was called: counts are those of the last completed step.
#[pyclass(frozen, get_all, module = "neuron_sched")]
pub(crate) struct RequestState {
    /// The name of the request.
    id: Py<PyString>,
    /// `"waiting"`, `"prefill"`, `"decode"`, `"finished"` or `"cancelled"`.
    status: &'static str,
    /// Why it finished; None while it lives, and when it was cancelled.
    finish_reason: Option<&'static str>,
    /// Length of the prompt.
    num_prompt_tokens: usize,
    /// Tokens whose KV entries are computed.
    num_computed_tokens: u32,
    /// What it emitted; None for a token that `complete` was not told.
    output_token_ids: Vec<Option<u32>>,
    /// The KV blocks that it holds, in order of position.
    block_ids: Vec<u32>,
}

impl RequestState {
    /// A snapshot of `view`.
    pub(crate) fn new(id: Py<PyString>, view: &RequestView<'_>) -> Self {
        let (status, finish_reason) = match view.status {
            Status::Waiting => ("waiting", None),
            Status::Prefill => ("prefill", None),
            Status::Decode => ("decode", None),
            Status::Finished(finish) => ("finished", Some(finish.name())),
            Status::Cancelled => ("cancelled", None),
        };
        let told = view.outputs.iter().map(|&id| (id != UNKNOWN_TOKEN).then_some(id));
        let output_token_ids = told.chain(std::iter::repeat(None)).take(view.generated as usize).collect();
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
