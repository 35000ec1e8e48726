//! `TraceRequest`: one request of a workload, as a Python value.

use std::fmt::Write;

use neuron_sched_core::config::TOKENS_MAX;
use neuron_sched_core::error::{Error, Fault};
use neuron_sched_core::request::{Prompt, SEGMENT_TOKENS};
use neuron_sched_core::sim::Arrival;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use super::number::{units, within};
use crate::convert::{sequence_len, shown};
use crate::error::to_py;

/// The largest hash id: a token is known by its id times [`SEGMENT_TOKENS`] plus its place.
const HASH_ID_MAX: u64 = (1 << 53) - 1;

/// Most hash ids of one request: a prompt of 2^31 tokens has no more.
const HASH_IDS_MAX: usize = 1 << 22;

/// One request of a workload; an immutable value.
#[pyclass(frozen, module = "neuron_sched.trace")]
pub(crate) struct TraceRequest {
    id: Py<PyString>,
    arrival_ns: u64,
    prompt_tokens: u32,
    output_tokens: u32,
    priority: i64,
    hash_ids: Option<Box<[u64]>>,
}

impl TraceRequest {
    /// Its id.
    pub(super) fn id<'py>(&self, py: Python<'py>) -> &Bound<'py, PyString> {
        self.id.bind(py)
    }

    /// What the core replays. With `by_content`, equal hash ids are equal prompt content.
    pub(super) fn arrival(&self, by_content: bool) -> Arrival {
        let prompt = match &self.hash_ids {
            Some(ids) if by_content => Prompt::Segments { ids: ids.clone(), length: self.prompt_tokens },
            _ => Prompt::Length(self.prompt_tokens),
        };
        Arrival { at: self.arrival_ns, prompt, outputs: self.output_tokens, priority: self.priority }
    }
}

#[pymethods]
impl TraceRequest {
    #[new]
    #[pyo3(
        signature = (id, arrival_s, prompt_tokens, output_tokens, *, priority=None, hash_ids=None),
        text_signature = "(id, arrival_s, prompt_tokens, output_tokens, *, priority=0, hash_ids=None)"
    )]
    fn new(
        id: &Bound<'_, PyAny>,
        arrival_s: &Bound<'_, PyAny>,
        prompt_tokens: &Bound<'_, PyAny>,
        output_tokens: &Bound<'_, PyAny>,
        priority: Option<&Bound<'_, PyAny>>,
        hash_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let mut reader = Reader { faults: Vec::new() };
        let id = reader.keep(id.cast::<PyString>().map_err(|_| Fault::new("id", shown(id), "a string")));
        let arrival_ns = reader.keep(units("arrival_s", arrival_s, 9));
        let prompt_tokens = reader.keep(within("prompt_tokens", prompt_tokens, (1, TOKENS_MAX)));
        let output_tokens = reader.keep(within("output_tokens", output_tokens, (1, TOKENS_MAX)));
        let priority =
            reader.keep(priority.map_or(Ok(0), |priority| within("priority", priority, (i64::MIN, i64::MAX))));
        let hash_ids = match (hash_ids, prompt_tokens) {
            (Some(ids), Some(prompt_tokens)) => reader.keep(segments(ids, prompt_tokens)).map(Some),
            _ => Some(None),
        };
        let read = || {
            Some(Self {
                id: id?.clone().unbind(),
                arrival_ns: arrival_ns?,
                prompt_tokens: prompt_tokens?,
                output_tokens: output_tokens?,
                priority: priority?,
                hash_ids: hash_ids?,
            })
        };
        read().ok_or_else(|| to_py(&Error::Invalid(reader.faults)))
    }

    /// The name.
    #[getter(id)]
    fn py_id(&self, py: Python<'_>) -> Py<PyString> {
        self.id.clone_ref(py)
    }

    /// The arrival in seconds, the float nearest to `arrival_ns`.
    #[getter]
    #[allow(clippy::cast_precision_loss, reason = "arrival_ns is the exact one")]
    fn arrival_s(&self) -> f64 {
        self.arrival_ns as f64 / 1e9
    }

    /// The arrival in whole nanoseconds.
    #[getter]
    fn arrival_ns(&self) -> u64 {
        self.arrival_ns
    }

    /// Length of the prompt.
    #[getter]
    fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Number of outputs.
    #[getter]
    fn output_tokens(&self) -> u32 {
        self.output_tokens
    }

    /// For the policy of that name: the lower number first. 0 unless given.
    #[getter]
    fn priority(&self) -> i64 {
        self.priority
    }

    /// What the prompt consists of, an id for each 512 tokens; None when that was not told.
    #[getter]
    fn hash_ids<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.hash_ids.as_ref().map(|ids| PyTuple::new(py, ids.iter())).transpose()
    }

    fn __eq__(&self, other: &Self, py: Python<'_>) -> PyResult<bool> {
        let same = self.arrival_ns == other.arrival_ns
            && (self.prompt_tokens, self.output_tokens) == (other.prompt_tokens, other.output_tokens)
            && (self.priority, &self.hash_ids) == (other.priority, &other.hash_ids);
        Ok(same && self.id(py).as_any().eq(other.id(py))?)
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        (self.id(py), self.arrival_ns).into_pyobject(py)?.hash()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let mut text = format!(
            "TraceRequest(id={}, arrival_s={:?}, prompt_tokens={}, output_tokens={}",
            self.id(py).repr()?,
            self.arrival_s(),
            self.prompt_tokens,
            self.output_tokens
        );
        if self.priority != 0 {
            let _ = write!(text, ", priority={}", self.priority);
        }
        if let Some(ids) = &self.hash_ids {
            let _ = write!(text, ", hash_ids={ids:?}");
        }
        Ok(text + ")")
    }
}

/// Collects faults, so that one error names them all.
struct Reader {
    faults: Vec<Fault>,
}

impl Reader {
    fn keep<T>(&mut self, read: Result<T, Fault>) -> Option<T> {
        read.map_err(|fault| self.faults.push(fault)).ok()
    }
}

/// One id for each 512 prompt tokens, the last ones too; more than that are kept but stand for nothing.
fn segments(ids: &Bound<'_, PyAny>, prompt_tokens: u32) -> Result<Box<[u64]>, Fault> {
    let fault = |expected: String| Fault::new("hash_ids", shown(ids), expected);
    let list = || fault("a list of whole numbers".into());
    let count = sequence_len(ids).ok_or_else(list)?;
    if count > HASH_IDS_MAX {
        return Err(fault(format!("at most {HASH_IDS_MAX} ids")));
    }
    let mut read = Vec::with_capacity(count);
    for item in ids.try_iter().map_err(|_| list())?.take(count) {
        read.push(within("hash_ids", &item.map_err(|_| list())?, (0, HASH_ID_MAX))?);
    }
    let needed = prompt_tokens.div_ceil(SEGMENT_TOKENS) as usize;
    if read.len() < needed {
        return Err(fault(format!("{needed} ids, one for each {SEGMENT_TOKENS} of {prompt_tokens} prompt tokens")));
    }
    Ok(read.into())
}
