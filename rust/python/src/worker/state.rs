//! `Worker`: reads what an engine's scheduler tells of a step, and the names of the requests that its worker knows.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};

use neuron_sched_core::config::TOKENS_MAX;
use neuron_sched_core::error::Error;
use neuron_sched_core::fill::Shape;
use neuron_sched_core::request::Row;
use neuron_sched_core::worker::{self, Plan, Told};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::message::{ToldStep, name_at};
use crate::convert::{Read, plain, sequence_len, shown};
use crate::error::to_py;
use crate::fill::{Batch, Given, PaddedInputs, bucket, refuse_bucket};
use crate::guard::Guarded;

/// The core, and names for its rows. Nothing that could run Python code is done while it is locked.
struct Named {
    core: worker::Worker,
    rows: HashMap<String, Row>,
    /// The names of each step in flight, in batch order.
    in_flight: VecDeque<Py<PyTuple>>,
}

/// What `VllmInputs` keeps of the requests of a vLLM worker; its methods may change with it.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Worker {
    /// Where the steps are written.
    #[pyo3(get)]
    inputs: Py<PaddedInputs>,
    named: Guarded<Named>,
    filling: AtomicBool,
    accepting: AtomicBool,
}

#[pymethods]
impl Worker {
    #[new]
    fn new(inputs: Bound<'_, PaddedInputs>) -> Self {
        let core = worker::Worker::new(inputs.get().layout().as_ref().clone());
        let named = Named { core, rows: HashMap::new(), in_flight: VecDeque::new() };
        Self {
            inputs: inputs.unbind(),
            named: Guarded::new(named),
            filling: AtomicBool::new(false),
            accepting: AtomicBool::new(false),
        }
    }

    /// The arrays of a step; None when nobody is scheduled. A refused step changes nothing.
    #[pyo3(signature = (step, tokens=None, context_bucket=None))]
    fn fill(
        &self,
        py: Python<'_>,
        step: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
        context_bucket: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Batch>> {
        let _alone = Alone::enter(&self.filling, "fill")?;
        let given = Given::read(tokens);
        let bucket = context_bucket.map(bucket).transpose()?;
        let mut step = ToldStep::read(step.extract().map_err(|error| malformed(step.py(), &error))?)?;
        if step.is_empty() {
            self.named.with(|named| named.finish(&step.finished))?;
            return Ok(None);
        }
        if !step.is_decode() {
            given.refuse_list("a prefill step knows its tokens")?;
            refuse_bucket(bucket)?;
        }
        let told = self.named.with(|named| step.resolve(&named.rows))??;
        let plan = self.plan(&step, &told, &given, bucket)?;
        self.commit(py, step, told, plan).map(Some)
    }

    /// Takes what the oldest step in flight has sampled: one list a row, with its token, or empty for a chunk in the
    /// middle of a prompt. `ValueError` when no step is in flight, and for a row with too few tokens or too many;
    /// `RuntimeError` while another `accept` of the same object runs.
    fn accept(&self, sampled: &Bound<'_, PyAny>) -> PyResult<()> {
        let _alone = Alone::enter(&self.accepting, "accept")?;
        let py = sampled.py();
        let Some(entries) = sequence_len(sampled) else {
            return Err(Read::Argument.type_error("sampled", sampled, "a sequence with one list a row"));
        };
        let names = self.named.with(|named| {
            named.core.check_due(entries)?;
            Ok(named.in_flight.front().expect("a step of the core has names").clone_ref(py))
        })?;
        let names = names.map_err(|error| to_py(&error))?.into_bound(py);
        let name = |at| name_at(&names, at);
        let tokens = read_sampled(sampled, entries, name)?;
        let accepted = self.named.with(|named| {
            named.core.accept(&tokens)?;
            Ok(named.in_flight.pop_front())
        })?;
        accepted.map(drop).map_err(|error| refused(&error, name))
    }

    /// Requests that are known.
    #[getter]
    fn num_requests(&self) -> PyResult<usize> {
        self.named.with(|named| named.core.len())
    }

    /// Steps that were filled and not accepted.
    #[getter]
    fn num_in_flight(&self) -> PyResult<usize> {
        self.named.with(|named| named.core.in_flight())
    }
}

impl Worker {
    /// Checks a step, with the tokens that are not known asked for.
    fn plan(&self, step: &ToldStep<'_>, told: &Told, given: &Given<'_>, bucket: Option<i64>) -> PyResult<Plan> {
        let plan = || {
            let planned = self.named.with(|named| {
                let plan = named.core.plan(told, bucket, |at| step.name(at));
                plan.map(|plan| (plan, named.core.in_flight()))
            })?;
            planned.map_err(|error| refused(&error, |at| step.name(at)))
        };
        let (mut planned, in_flight) = plan()?;
        let unknown = || Ok(planned.unknown().collect());
        let tokens = given.resolve(&step.names, unknown)?;
        if self.num_in_flight()? != in_flight {
            // The callable has accepted a step, or another thread has.
            planned = plan()?.0;
        }
        self.named
            .with(|named| named.core.give(&mut planned, tokens.as_deref().unwrap_or_default()))?
            .map_err(|error| refused(&error, |at| step.name(at)))?;
        Ok(planned)
    }

    /// Takes over what a step tells, and writes it.
    fn commit(&self, py: Python<'_>, step: ToldStep<'_>, told: Told, plan: Plan) -> PyResult<Batch> {
        let (shape, total) = (plan.shape(), plan.total());
        let emits: Vec<bool> = plan.emits().collect();
        let inputs = self.inputs.get();
        let buffers = inputs.buffers(py, shape)?;
        let names = step.names.unbind();
        self.named.with(|named| {
            for name in &step.finished {
                named.rows.remove(name);
            }
            let rows: Vec<Row> = named.core.commit(told, plan).collect();
            named.rows.extend(step.fresh.into_iter().filter_map(|(at, name)| Some((name, *rows.get(at)?))));
            named.in_flight.push_back(names.clone_ref(py));
            match shape {
                Shape::Prefill { .. } => buffers.write_prefill(named.core.prefill_rows()),
                Shape::Decode { .. } => buffers.write_decode(named.core.decode_rows()),
            }
        })??;
        inputs.keep(shape)?;
        Ok(Batch::new(buffers, names, total).emitting(emits))
    }
}

impl Named {
    /// Forgets who ended, where nobody runs.
    fn finish(&mut self, finished: &[String]) {
        let rows: Vec<Row> = finished.iter().filter_map(|name| self.rows.remove(name)).collect();
        self.core.finish(&rows);
    }
}

/// Steps are told, and accepted, in order: one call of a kind at a time, whatever code of Python's a call runs.
struct Alone<'a>(&'a AtomicBool);

impl<'a> Alone<'a> {
    fn enter(running: &'a AtomicBool, call: &str) -> PyResult<Self> {
        if running.swap(true, Ordering::Acquire) {
            let message = format!("{call}: called while another {call} of the same object runs");
            return Err(PyRuntimeError::new_err(message));
        }
        Ok(Self(running))
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The exception for a refused step; what it breaks is the caller's.
fn refused(error: &Error, name: impl Fn(usize) -> String) -> PyErr {
    match error {
        Error::Row { at, fault } => PyValueError::new_err(format!("request '{}': {fault}", name(*at))),
        Error::Violation(what) => PyValueError::new_err(what.clone()),
        Error::Invalid(_)
        | Error::PromptTooLong { .. }
        | Error::NeverFits { .. }
        | Error::NotDue(_)
        | Error::Broken(_) => to_py(error),
    }
}

/// What is no step at all: some part of it is of another type than vLLM's.
fn malformed(py: Python<'_>, error: &PyErr) -> PyErr {
    PyTypeError::new_err(format!("scheduler_output: {}: expected a SchedulerOutput of vLLM", error.value(py)))
}

/// One list a row, with a token or without.
fn read_sampled(sampled: &Bound<'_, PyAny>, rows: usize, name: impl Fn(usize) -> String) -> PyResult<Vec<Option<u32>>> {
    let mut tokens = Vec::with_capacity(rows);
    for (at, entry) in sampled.try_iter()?.enumerate().take(rows) {
        let entry = entry?;
        tokens.push(match sequence_len(&entry) {
            Some(0) => None,
            Some(1) => {
                let token = entry.get_item(0)?;
                let known = plain(&token).filter(|&token| token <= TOKENS_MAX);
                Some(known.map_or_else(|| Read::Request(&name(at)).number("sampled", &token, 0), Ok)?)
            }
            Some(_) => {
                let (name, value) = (name(at), shown(&entry));
                return Err(Read::Request(&name).value_error("sampled", &value, "one token, or none"));
            }
            None => {
                let (name, expected) = (name(at), "a list of one token, or an empty one");
                return Err(Read::Request(&name).type_error("sampled", &entry, expected));
            }
        });
    }
    Ok(tokens)
}
