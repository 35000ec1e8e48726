//! `ReplayReport`: the result of a replay. Its Python values are created when they are read.

use neuron_sched_core::sim::{Bucket, Distribution, Refusal, Report, Steps, Summary};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyList, PyString};

use super::request::TraceRequest;

/// The result of a replay; internal to `neuron_sched.simulate.Report`.
#[pyclass(frozen, module = "neuron_sched._native")]
pub(crate) struct ReplayReport {
    requests: Vec<Py<TraceRequest>>,
    inner: Report,
}

impl ReplayReport {
    pub(super) fn new(requests: Vec<Py<TraceRequest>>, inner: Report) -> Self {
        Self { requests, inner }
    }

    fn id<'py>(&'py self, py: Python<'py>, request: u32) -> &'py Bound<'py, PyString> {
        self.requests[request as usize].get().id(py)
    }

    fn rejections<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let rejections = PyList::empty(py);
        for &request in &self.inner.refused {
            let rejection = PyDict::new(py);
            rejection.set_item("id", self.id(py, request))?;
            rejection.set_item("reason", self.inner.records[request as usize].refusal.map(Refusal::name))?;
            rejections.append(rejection)?;
        }
        Ok(rejections)
    }
}

/// Id, status, reason, arrival, time to first token, end-to-end time, mean inter-token latency (times in seconds) and
/// number of outputs.
type RequestColumns =
    (Py<PyString>, &'static str, Option<&'static str>, f64, Option<f64>, Option<f64>, Option<f64>, u32);

/// Start and end in seconds, kind, number of tokens by id, padded number of tokens.
type StepColumns<'py> = (f64, f64, &'static str, Bound<'py, PyDict>, u32);

#[pymethods]
impl ReplayReport {
    /// Return the figures of the run that docs/replay.md lists.
    fn summary<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let summary = &self.inner.summary;
        let dict = PyDict::new(py);
        dict.set_item("completed", summary.completed)?;
        dict.set_item("rejected", summary.rejected)?;
        dict.set_item("rejections", self.rejections(py)?)?;
        dict.set_item("makespan_s", summary.makespan_s)?;
        dict.set_item("requests_per_s", summary.requests_per_s)?;
        dict.set_item("output_tokens_per_s", summary.output_tokens_per_s)?;
        for (name, times) in times(summary) {
            dict.set_item(name, distribution(py, times)?)?;
        }
        let steps = [("prefill", summary.steps.prefill), ("decode", summary.steps.decode)];
        dict.set_item("steps", steps.into_py_dict(py)?)?;
        let tokens = [
            ("prompt", summary.tokens.prompt),
            ("prompt_padded", summary.tokens.prompt_padded),
            ("decode", summary.tokens.decode),
            ("decode_padded", summary.tokens.decode_padded),
        ];
        dict.set_item("tokens", tokens.into_py_dict(py)?)?;
        let padding = PyDict::new(py);
        padding.set_item("prefill", buckets(py, &summary.prefill_padding)?)?;
        padding.set_item("decode", buckets(py, &summary.decode_padding)?)?;
        dict.set_item("padding", padding)?;
        dict.set_item("wait_reasons", summary.wait_reasons_ms.iter().copied().into_py_dict(py)?)?;
        Ok(dict)
    }

    fn __len__(&self) -> usize {
        self.requests.len()
    }

    /// Return the record of one request.
    ///
    /// Items: id, status, refusal reason, arrival, time to first token, end-to-end time, mean inter-token latency,
    /// number of outputs. Times are in seconds. Raise `IndexError` if there is no such request.
    fn request(&self, py: Python<'_>, index: usize) -> PyResult<RequestColumns> {
        let Some(record) = self.inner.records.get(index) else {
            return Err(PyIndexError::new_err("request index out of range"));
        };
        let id = self.requests[index].get().id(py).clone().unbind();
        let status = if record.refusal.is_some() { "rejected" } else { "completed" };
        let reason = record.refusal.map(Refusal::name);
        let times = (record.arrival_s(), record.ttft_s(), record.e2e_s(), record.mean_itl_s());
        Ok((id, status, reason, times.0, times.1, times.2, times.3, record.outputs))
    }

    /// Number of recorded steps; `None` if steps were not recorded.
    #[getter]
    fn num_steps(&self) -> Option<u64> {
        self.inner.steps.as_ref().map(Steps::len)
    }

    /// Return one recorded step.
    ///
    /// Items: start and end in seconds, kind, number of tokens by request id, padded number of tokens. Raise
    /// `IndexError` if there is no such step.
    fn step<'py>(&self, py: Python<'py>, index: u64) -> PyResult<StepColumns<'py>> {
        let Some(step) = self.inner.steps.as_ref().and_then(|steps| steps.get(index)) else {
            return Err(PyIndexError::new_err("step index out of range"));
        };
        let tokens = PyDict::new(py);
        for entry in step.entries {
            tokens.set_item(self.id(py, entry.request), entry.tokens)?;
        }
        Ok((step.start_s(), step.end_s(), step.kind.name(), tokens, step.padded))
    }
}

fn times(summary: &Summary) -> [(&'static str, Option<Distribution>); 4] {
    let Summary { ttft_ms, itl_ms, e2e_ms, queue_ms, .. } = summary;
    [("ttft_ms", *ttft_ms), ("itl_ms", *itl_ms), ("e2e_ms", *e2e_ms), ("queue_ms", *queue_ms)]
}

fn distribution(py: Python<'_>, times: Option<Distribution>) -> PyResult<Bound<'_, PyDict>> {
    let of = |part: fn(Distribution) -> f64| times.map(part);
    let parts = [
        ("mean", of(|times| times.mean)),
        ("p50", of(|times| times.p50)),
        ("p90", of(|times| times.p90)),
        ("p99", of(|times| times.p99)),
        ("max", of(|times| times.max)),
    ];
    parts.into_py_dict(py)
}

/// Return the buckets by size. Keys are text, as JSON requires.
fn buckets<'py>(py: Python<'py>, sizes: &[(u32, Bucket)]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (size, bucket) in sizes {
        let counts = [("steps", bucket.steps), ("real", bucket.real), ("padded", bucket.padded)];
        dict.set_item(size.to_string(), counts.into_py_dict(py)?)?;
    }
    Ok(dict)
}
