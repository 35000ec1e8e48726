//! `Worker`: the core's worker, with request ids for its rows.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};

use neuron_sched_core::config::TOKENS_MAX;
use neuron_sched_core::error::Error;
use neuron_sched_core::fill::Shape;
use neuron_sched_core::request::Row;
use neuron_sched_core::worker::{self, Plan, ScheduledStep};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::scheduler_output::{SchedulerOutput, id_at};
use crate::convert::{FieldReader, as_small_int, display, sequence_len};
use crate::error::to_py;
use crate::fill::{Batch, PaddedInputs, TokensArgument, bucket, refuse_bucket};
use crate::guard::Guarded;

/// The core and the request ids of its rows. No Python code may run while it is locked.
struct NamedCore {
    core: worker::Worker,
    rows: HashMap<String, Row>,
    /// The request ids of each step in flight, in batch order.
    in_flight: VecDeque<Py<PyTuple>>,
}

/// The requests of a vLLM worker; internal to `VllmInputs`.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Worker {
    /// The inputs that fill the arrays of a step.
    #[pyo3(get)]
    inputs: Py<PaddedInputs>,
    named: Guarded<NamedCore>,
    filling: AtomicBool,
    accepting: AtomicBool,
}

#[pymethods]
impl Worker {
    #[new]
    fn new(inputs: Bound<'_, PaddedInputs>) -> Self {
        let core = worker::Worker::new(inputs.get().layout().as_ref().clone());
        let named = NamedCore { core, rows: HashMap::new(), in_flight: VecDeque::new() };
        Self {
            inputs: inputs.unbind(),
            named: Guarded::new(named),
            filling: AtomicBool::new(false),
            accepting: AtomicBool::new(false),
        }
    }

    /// Fill the arrays of a step, and return them; `None` if no request is scheduled.
    ///
    /// A refused step changes nothing. Raise `RuntimeError` while another `fill` of the same object runs.
    #[pyo3(signature = (step, tokens=None, context_bucket=None))]
    fn fill(
        &self,
        py: Python<'_>,
        step: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
        context_bucket: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Batch>> {
        let _guard = CallGuard::enter(&self.filling, "fill")?;
        let tokens = TokensArgument::read(tokens);
        let bucket = context_bucket.map(bucket).transpose()?;
        let mut output = SchedulerOutput::read(step.extract().map_err(|error| malformed(step.py(), &error))?)?;
        if output.is_empty() {
            self.named.with(|named| named.finish(&output.finished))?;
            return Ok(None);
        }
        if !output.is_decode() {
            tokens.refuse_sequence("the tokens of a prefill step are known")?;
            refuse_bucket(bucket)?;
        }
        let step = self.named.with(|named| output.resolve(&named.rows))??;
        let plan = self.plan(&output, &step, &tokens, bucket)?;
        self.commit(py, output, step, plan).map(Some)
    }

    /// Append the tokens sampled by the oldest step in flight.
    ///
    /// `sampled` has one list per unpadded row, in batch order: one token, or an empty list for a chunk that does not
    /// end its prompt. Raise `ValueError` if no step is in flight, or for a row with too few or too many tokens, and
    /// `RuntimeError` while another `accept` of the same object runs.
    fn accept(&self, sampled: &Bound<'_, PyAny>) -> PyResult<()> {
        let _guard = CallGuard::enter(&self.accepting, "accept")?;
        let py = sampled.py();
        let Some(entries) = sequence_len(sampled) else {
            return Err(FieldReader::Argument.type_error("sampled", sampled, "a sequence with one list per row"));
        };
        let ids = self.named.with(|named| {
            named.core.check_due(entries)?;
            Ok(named.in_flight.front().expect("a step of the core has ids").clone_ref(py))
        })?;
        let ids = ids.map_err(|error| to_py(&error))?.into_bound(py);
        let id = |at| id_at(&ids, at);
        let tokens = read_sampled(sampled, entries, id)?;
        let accepted = self.named.with(|named| {
            named.core.accept(&tokens)?;
            Ok(named.in_flight.pop_front())
        })?;
        accepted.map(drop).map_err(|error| refused(&error, id))
    }

    /// Number of known requests.
    #[getter]
    fn num_requests(&self) -> PyResult<usize> {
        self.named.with(|named| named.core.len())
    }

    /// Number of steps in flight: filled and not accepted yet.
    #[getter]
    fn num_in_flight(&self) -> PyResult<usize> {
        self.named.with(|named| named.core.in_flight())
    }
}

impl Worker {
    /// Plan a step, with its unknown tokens taken from `tokens`.
    fn plan(
        &self,
        output: &SchedulerOutput<'_>,
        step: &ScheduledStep,
        tokens: &TokensArgument<'_>,
        bucket: Option<i64>,
    ) -> PyResult<Plan> {
        let plan = || {
            let planned = self.named.with(|named| {
                let plan = named.core.plan(step, bucket, |at| output.id(at));
                plan.map(|plan| (plan, named.core.in_flight()))
            })?;
            planned.map_err(|error| refused(&error, |at| output.id(at)))
        };
        let (mut planned, in_flight) = plan()?;
        let unknown = || Ok(planned.unknown().collect());
        let tokens = tokens.resolve(&output.ids, unknown)?;
        if self.num_in_flight()? != in_flight {
            // The callable or another thread has accepted a step, so that more tokens are known.
            planned = plan()?.0;
        }
        self.named
            .with(|named| named.core.supply_tokens(&mut planned, tokens.as_deref().unwrap_or_default()))?
            .map_err(|error| refused(&error, |at| output.id(at)))?;
        Ok(planned)
    }

    /// Commit a planned step, and fill its arrays.
    fn commit(&self, py: Python<'_>, output: SchedulerOutput<'_>, step: ScheduledStep, plan: Plan) -> PyResult<Batch> {
        let (shape, total) = (plan.shape(), plan.total());
        let emits: Vec<bool> = plan.emits().collect();
        let inputs = self.inputs.get();
        let buffers = inputs.buffers(py, shape)?;
        let ids = output.ids.unbind();
        self.named.with(|named| {
            for id in &output.finished {
                named.rows.remove(id);
            }
            let rows: Vec<Row> = named.core.commit(step, plan).collect();
            named.rows.extend(output.new.into_iter().filter_map(|(at, id)| Some((id, *rows.get(at)?))));
            named.in_flight.push_back(ids.clone_ref(py));
            match shape {
                Shape::Prefill { .. } => buffers.write_prefill(named.core.prefill_rows()),
                Shape::Decode { .. } => buffers.write_decode(named.core.decode_rows()),
            }
        })??;
        inputs.advance(shape)?;
        Ok(Batch::new(buffers, ids, total).emitting(emits))
    }
}

impl NamedCore {
    /// Remove the finished requests of a step without scheduled requests.
    fn finish(&mut self, finished: &[String]) {
        let rows: Vec<Row> = finished.iter().filter_map(|id| self.rows.remove(id)).collect();
        self.core.finish(&rows);
    }
}

/// Refuses a call while another call of the same method runs, in another thread or further up the stack: steps must be
/// filled and accepted in order.
struct CallGuard<'a>(&'a AtomicBool);

impl<'a> CallGuard<'a> {
    fn enter(running: &'a AtomicBool, call: &str) -> PyResult<Self> {
        if running.swap(true, Ordering::Acquire) {
            let message = format!("{call}: called while another {call} of the same object runs");
            return Err(PyRuntimeError::new_err(message));
        }
        Ok(Self(running))
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Return the exception for a refused step. A step that breaks a rule is the caller's mistake here.
fn refused(error: &Error, id: impl Fn(usize) -> String) -> PyErr {
    match error {
        Error::Row { at, fault } => PyValueError::new_err(format!("request '{}': {fault}", id(*at))),
        Error::BadStep(what) => PyValueError::new_err(what.clone()),
        Error::Invalid(_)
        | Error::PromptTooLong { .. }
        | Error::NeverFits { .. }
        | Error::NotDue(_)
        | Error::InvariantViolated(_) => to_py(error),
    }
}

/// Return the exception for a step with a part of a wrong type.
fn malformed(py: Python<'_>, error: &PyErr) -> PyErr {
    PyTypeError::new_err(format!("scheduler_output: {}: expected a SchedulerOutput of vLLM", error.value(py)))
}

/// Read the sampled tokens: one list per row, of one token or empty.
fn read_sampled(sampled: &Bound<'_, PyAny>, rows: usize, id: impl Fn(usize) -> String) -> PyResult<Vec<Option<u32>>> {
    let mut tokens = Vec::with_capacity(rows);
    for (at, entry) in sampled.try_iter()?.enumerate().take(rows) {
        let entry = entry?;
        tokens.push(match sequence_len(&entry) {
            Some(0) => None,
            Some(1) => {
                let token = entry.get_item(0)?;
                let known = as_small_int(&token).filter(|&token| token <= TOKENS_MAX);
                Some(known.map_or_else(|| FieldReader::Request(&id(at)).number("sampled", &token, 0), Ok)?)
            }
            Some(_) => {
                let (id, value) = (id(at), display(&entry));
                return Err(FieldReader::Request(&id).value_error("sampled", &value, "one token, or none"));
            }
            None => {
                let (id, expected) = (id(at), "a list of one token, or an empty list");
                return Err(FieldReader::Request(&id).type_error("sampled", &entry, expected));
            }
        });
    }
    Ok(tokens)
}
