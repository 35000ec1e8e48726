//! `PaddedInputs`: the tensors of a step, in memory that belongs to their shape.

use std::collections::HashMap;
use std::sync::Arc;

use neuron_sched_core::decide::Kind;
use neuron_sched_core::error::{Error, Fault};
use neuron_sched_core::exclusive::Unfilled;
use neuron_sched_core::fill::{self, Layout, Seen, Shape};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::batch::{self, Batch};
use super::buffers::Buffers;
use super::rows::{DecodeRow, PrefillRow, read_rows};
use super::tokens::Given;
use crate::config::NeuronConfig;
use crate::convert::{Read, shown, whole};
use crate::error::to_py;
use crate::exclusive::Step;
use crate::guard::Guarded;

/// Most buffers of a shape: more steps than any device has in flight.
const BUFFERS_MAX: u32 = 1024;

/// Memory that fills use again.
#[derive(Default)]
struct Memory {
    shelves: HashMap<Shape, Shelf>,
    seen: Seen,
}

/// The buffers of a shape, in turn.
struct Shelf {
    buffers: Vec<Arc<Buffers>>,
    next: usize,
}

/// Turns steps into arrays of compiled shapes, in memory that it uses again.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct PaddedInputs {
    /// The configuration that it was made with.
    #[pyo3(get)]
    config: Py<NeuronConfig>,
    layout: Arc<Layout>,
    /// How many buffers each shape has.
    buffers: usize,
    memory: Guarded<Memory>,
}

impl PaddedInputs {
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The buffers that a fill of the shape is to use now. Made when the shape is first filled.
    pub(crate) fn buffers(&self, py: Python<'_>, shape: Shape) -> PyResult<Arc<Buffers>> {
        let find = |memory: &mut Memory| memory.shelves.get(&shape).map(|shelf| Arc::clone(&shelf.buffers[shelf.next]));
        if let Some(buffers) = self.memory.with(find)? {
            return Ok(buffers);
        }
        let made = (0..self.buffers).map(|_| Buffers::new(py, &self.layout, shape).map(Arc::new));
        let buffers = made.collect::<PyResult<Vec<_>>>()?;
        let mut made = Some(Shelf { buffers, next: 0 });
        // Another thread may have been faster; then what was made here is dropped once nothing is locked.
        self.memory.with(|memory| {
            let shelf = memory.shelves.entry(shape).or_insert_with(|| made.take().expect("taken once"));
            Arc::clone(&shelf.buffers[shelf.next])
        })
    }

    /// What was written stays until the other buffers of the shape had their turn.
    pub(crate) fn keep(&self, shape: Shape) -> PyResult<()> {
        self.memory.with(|memory| {
            if let Some(shelf) = memory.shelves.get_mut(&shape) {
                shelf.next = (shelf.next + 1) % shelf.buffers.len();
            }
        })
    }

    fn fill_prefill(&self, py: Python<'_>, step: &Step) -> PyResult<Batch> {
        let planned = &step.planned;
        let shape = Shape::Prefill { tokens: planned.padded_tokens() };
        let buffers = self.buffers(py, shape)?;
        let rows = 0..planned.rows().len();
        let written = step.scheduler.get().read(|core| {
            for at in rows.clone() {
                let row = core.prefill_row(planned, at)?;
                self.layout.check_tokens(row.tokens).map_err(|fault| Refused::Row(at, fault))?;
            }
            let rows = rows.map(|at| core.prefill_row(planned, at).expect("checked above"));
            buffers.write_prefill(rows).map_err(Refused::Unwritten)
        });
        written?.map_err(|refused| refused.told(py, step))?;
        self.keep(shape)?;
        let batch = Batch::new(buffers, step.names.ids(py), planned.total());
        Ok(batch.emitting((0..planned.rows().len()).map(|at| planned.emits(at))))
    }

    fn fill_decode(&self, py: Python<'_>, step: &Step, given: &Given<'_>, bucket: Option<i64>) -> PyResult<Batch> {
        let planned = &step.planned;
        let scheduler = step.scheduler.get();
        let rows = planned.rows().len();
        let context = scheduler.read(|core| core.decode_context(planned))?;
        let shape = self.layout.decode(rows, context.into(), bucket).map_err(|error| to_py(&error))?;
        let unknown = || {
            let unknown = scheduler.read(|core| core.unknown_decodes(planned).map(Iterator::collect))?;
            unknown.map_err(|why| Refused::Unfilled(why).told(py, step))
        };
        let given = given.resolve(step.names.ids(py).bind(py), unknown)?;
        // Only now: a callable may have filled a step itself.
        let buffers = self.buffers(py, shape)?;
        let written = scheduler.read(|core| {
            core.check_decodes(planned, given.as_deref())?;
            if self.layout.has_vocabulary() {
                for (at, token) in core.decode_tokens(planned, given.as_deref()).enumerate() {
                    self.layout.check_token(token, "token_id").map_err(|fault| Refused::Row(at, fault))?;
                }
            }
            buffers.write_decode(core.decode_rows(planned, given.as_deref())).map_err(Refused::Unwritten)
        });
        written?.map_err(|refused| refused.told(py, step))?;
        self.keep(shape)?;
        Ok(Batch::new(buffers, step.names.ids(py), planned.total()))
    }
}

#[pymethods]
impl PaddedInputs {
    #[new]
    #[pyo3(
        signature = (config, *, buffers=None, vocab_size=None),
        text_signature = "(config, *, buffers=1, vocab_size=None)"
    )]
    fn new(
        config: Bound<'_, NeuronConfig>,
        buffers: Option<&Bound<'_, PyAny>>,
        vocab_size: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let read = Read::Argument;
        let buffers = buffers.map_or(Ok(1), |value| read.count("buffers", value, 1..=BUFFERS_MAX.into()))?;
        let vocab_size = vocab_size.map(|value| read.number("vocab_size", value, 1)).transpose()?;
        let layout = Layout::new(config.get().core(), vocab_size).map_err(|error| to_py(&error))?;
        let buffers = usize::try_from(buffers).expect("at most BUFFERS_MAX");
        Ok(Self { config: config.unbind(), layout: Arc::new(layout), buffers, memory: Guarded::new(Memory::default()) })
    }

    /// The arrays of a `BucketScheduler` step, while it is readable.
    ///
    /// `tokens` are for decode rows whose token the scheduler does not know, as of a step planned ahead: one entry
    /// a row, a token id or None; or a callable that is given the ids of those requests and returns their token ids.
    /// `context_bucket` asks for a larger context bucket than the rows need.
    #[pyo3(signature = (step, tokens=None, *, context_bucket=None))]
    fn fill(
        &self,
        step: &Bound<'_, Step>,
        tokens: Option<&Bound<'_, PyAny>>,
        context_bucket: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Batch> {
        let (py, step) = (step.py(), step.get());
        let config = &step.scheduler.get().config;
        if !config.is(&self.config) && config.get() != self.config.get() {
            return Err(PyValueError::new_err("step: planned with another configuration than that of these inputs"));
        }
        let given = Given::read(tokens);
        let bucket = context_bucket.map(bucket).transpose()?;
        match step.planned.kind() {
            Kind::Idle => Err(PyValueError::new_err("step: idle: expected a step with rows")),
            Kind::Prefill => {
                given.refuse_list("a prefill step knows its tokens")?;
                refuse_bucket(bucket)?;
                self.fill_prefill(py, step)
            }
            Kind::Decode => self.fill_decode(py, step, &given, bucket),
        }
    }

    /// The arrays of a prefill of these rows, for callers with a scheduler of their own.
    fn prefill(&self, rows: &Bound<'_, PyAny>) -> PyResult<Batch> {
        let py = rows.py();
        let fits = |count| self.layout.prefill(count, 1);
        let (rows, ids) = read_rows(rows, "PrefillRow", fits, PrefillRow::read)?;
        let emits: Vec<bool> = rows.iter().map(|row| row.emits).collect();
        let rows: Vec<fill::PrefillRow<'_>> = rows.iter().map(PrefillRow::borrow).collect();
        let shape = self.memory.with(|memory| self.layout.check_prefill(&rows, &mut memory.seen))?;
        let shape = shape.map_err(|error| to_py(&error))?;
        let buffers = self.buffers(py, shape)?;
        buffers.write_prefill(rows.iter().copied())?;
        self.keep(shape)?;
        let total: usize = rows.iter().map(|row| row.tokens.len()).sum();
        Ok(Batch::new(buffers, ids, u32::try_from(total).expect("at most a bucket")).emitting(emits))
    }

    /// The arrays of a decode step of these rows, for callers with a scheduler of their own.
    #[pyo3(signature = (rows, context_bucket=None))]
    fn decode(&self, rows: &Bound<'_, PyAny>, context_bucket: Option<&Bound<'_, PyAny>>) -> PyResult<Batch> {
        let py = rows.py();
        let bucket = context_bucket.map(bucket).transpose()?;
        let fits = |count| self.layout.decode(count, 1, None);
        let (rows, ids) = read_rows(rows, "DecodeRow", fits, DecodeRow::read)?;
        let rows: Vec<fill::DecodeRow<'_>> = rows.iter().map(DecodeRow::borrow).collect();
        let shape = self.memory.with(|memory| self.layout.check_decode(&rows, bucket, &mut memory.seen))?;
        let shape = shape.map_err(|error| to_py(&error))?;
        let buffers = self.buffers(py, shape)?;
        buffers.write_decode(rows.iter().copied())?;
        self.keep(shape)?;
        Ok(Batch::new(buffers, ids, u32::try_from(rows.len()).expect("at most a bucket")))
    }

    /// The arrays of a step without any request: nothing but padding, which writes nothing to the KV cache.
    ///
    /// For warm-up, and for a rank that has nothing to do while others run a step.
    fn dummy(&self, shape: &Bound<'_, PyAny>) -> PyResult<Batch> {
        let py = shape.py();
        let read = read_shape(shape).filter(|&shape| self.layout.contains(shape));
        let shape = read.ok_or_else(|| {
            PyValueError::new_err(format!("shape: {}: expected one of PaddedInputs.shapes", shown(shape)))
        })?;
        let buffers = self.buffers(py, shape)?;
        match shape {
            Shape::Prefill { .. } => buffers.write_prefill([])?,
            Shape::Decode { .. } => buffers.write_decode([])?,
        }
        self.keep(shape)?;
        Ok(Batch::new(buffers, PyTuple::empty(py).unbind(), 0))
    }

    /// Every compiled shape: prefills, then decodes by rows and context, ascending.
    #[getter]
    fn shapes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let shapes: Vec<_> = self.layout.shapes().map(|shape| batch::key(py, shape)).collect::<PyResult<_>>()?;
        PyTuple::new(py, shapes)
    }

    fn __repr__(&self) -> String {
        format!("<PaddedInputs: {} shapes>", self.layout.shapes().count())
    }
}

/// Reads a context bucket; the core knows which there are.
pub(crate) fn bucket(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    Read::Argument.count("context_bucket", value, i64::MIN..=i64::MAX)
}

/// A prefill looks back on whatever its table holds.
pub(crate) fn refuse_bucket(bucket: Option<i64>) -> PyResult<()> {
    bucket.map_or(Ok(()), |bucket| Err(to_py(&Error::invalid("context_bucket", bucket, "None for a prefill step"))))
}

fn read_shape(shape: &Bound<'_, PyAny>) -> Option<Shape> {
    let size = |at| whole(&shape.get_item(at).ok()?)?.extract::<u32>().ok();
    let kind: String = shape.get_item(0).ok()?.extract().ok()?;
    match (kind.as_str(), shape.len().ok()?) {
        ("prefill", 2) => Some(Shape::Prefill { tokens: size(1)? }),
        ("decode", 3) => Some(Shape::Decode { rows: size(1)?, context: size(2)? }),
        _ => None,
    }
}

/// Why a step was not filled.
enum Refused {
    Unfilled(Unfilled),
    /// The row at this position is wrong.
    Row(usize, Fault),
    Unwritten(PyErr),
}

impl From<Unfilled> for Refused {
    fn from(why: Unfilled) -> Self {
        Self::Unfilled(why)
    }
}

impl Refused {
    /// The exception, with the names of `step`.
    fn told(self, py: Python<'_>, step: &Step) -> PyErr {
        let of = |at| step.names.id(py, at);
        match self {
            Self::Unfilled(Unfilled::TooOld) => {
                PyValueError::new_err("step: too old: its blocks may have been handed out again")
            }
            Self::Unfilled(Unfilled::Unknown(at)) => PyValueError::new_err(format!(
                "request '{}': its token ids are not known: expected a prompt of token ids, and tokens handed to \
                 complete() or to fill()",
                of(at)
            )),
            Self::Unfilled(Unfilled::Other(at, known)) => PyValueError::new_err(format!(
                "request '{}': tokens: another token: expected None or {known}, which was handed to complete()",
                of(at)
            )),
            Self::Row(at, fault) => PyValueError::new_err(format!("request '{}': {fault}", of(at))),
            Self::Unwritten(error) => error,
        }
    }
}
