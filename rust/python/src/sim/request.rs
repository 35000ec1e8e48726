//! `TraceRequest`: one request of a workload.

use std::fmt::Write;

use neuron_sched_core::config::TOKENS_MAX;
use neuron_sched_core::error::{Error, Fault};
use neuron_sched_core::request::{Prompt, SEGMENT_TOKENS};
use neuron_sched_core::sim::Arrival;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use super::number::{units, within};
use crate::convert::{display, sequence_len};
use crate::error::to_py;

/// Largest hash id. The content of a token is identified by the hash id times [`SEGMENT_TOKENS`] plus the token's
/// position in the segment.
const HASH_ID_MAX: u64 = (1 << 53) - 1;

/// Maximum number of hash ids of one request: those of a prompt of 2^31 tokens.
const HASH_IDS_MAX: usize = 1 << 22;

/// An immutable request of a workload.
///
/// `arrival_s` is the arrival in seconds, at least 0, rounded half up to nanoseconds; only differences between requests
/// matter. A float is read as the shortest decimal that converts to it. `hash_ids` identify the content of the prompt,
/// one id per 512 tokens: segments with equal ids have equal tokens, which prefix caching shares.
///
/// One `ValueError` lists all bad fields.
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
    /// Return the id.
    pub(super) fn id<'py>(&self, py: Python<'py>) -> &Bound<'py, PyString> {
        self.id.bind(py)
    }

    /// Return the request for the core. With `by_content`, the prompt is given by its hash ids, if it has any.
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
        let id = reader.keep(id.cast::<PyString>().map_err(|_| Fault::new("id", display(id), "a string")));
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

    /// Id of the request.
    #[getter(id)]
    fn py_id(&self, py: Python<'_>) -> Py<PyString> {
        self.id.clone_ref(py)
    }

    /// Arrival in seconds: the float nearest to `arrival_ns`.
    #[getter]
    #[allow(clippy::cast_precision_loss, reason = "`arrival_ns` is exact")]
    fn arrival_s(&self) -> f64 {
        self.arrival_ns as f64 / 1e9
    }

    /// Arrival in whole nanoseconds.
    #[getter]
    fn arrival_ns(&self) -> u64 {
        self.arrival_ns
    }

    /// Number of prompt tokens.
    #[getter]
    fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Number of output tokens.
    #[getter]
    fn output_tokens(&self) -> u32 {
        self.output_tokens
    }

    /// Priority under policy `"priority"`, 0 by default; the lowest number is admitted first.
    #[getter]
    fn priority(&self) -> i64 {
        self.priority
    }

    /// Content of the prompt, one id per 512 tokens; `None` if it is unknown.
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

/// Collects the faults of all fields, for one error.
struct Reader {
    faults: Vec<Fault>,
}

impl Reader {
    /// Return the value, or add its fault.
    fn keep<T>(&mut self, read: Result<T, Fault>) -> Option<T> {
        read.map_err(|fault| self.faults.push(fault)).ok()
    }
}

/// Read the hash ids: at least one per segment of 512 prompt tokens, a last partial segment included. Further ids are
/// kept and have no effect.
fn segments(ids: &Bound<'_, PyAny>, prompt_tokens: u32) -> Result<Box<[u64]>, Fault> {
    let fault = |expected: String| Fault::new("hash_ids", display(ids), expected);
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
