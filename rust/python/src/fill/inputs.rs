//! `PaddedInputs`: fills the arrays of a step in memory that is reused from step to step.

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
use super::tokens::TokensArgument;
use crate::config::NeuronConfig;
use crate::convert::{FieldReader, as_int, display, instance};
use crate::error::to_py;
use crate::exclusive::Step;
use crate::guard::Guarded;

/// Maximum number of buffers per shape: more steps than any device has in flight.
const BUFFERS_MAX: u32 = 1024;

/// The memory that fills reuse.
#[derive(Default)]
struct Memory {
    buffer_sets: HashMap<Shape, BufferSet>,
    seen: Seen,
}

/// The buffers of a shape, used in rotation.
struct BufferSet {
    buffers: Vec<Arc<Buffers>>,
    next: usize,
}

/// Fills the arrays of compiled shapes with the rows of a step, in memory that is reused.
///
/// The shapes are those of the configuration's buckets. `buffers` is the number of steps of one shape that may be in
/// flight. With `vocab_size`, token ids of at least `vocab_size` are refused. A refused call writes nothing: it raises
/// `ValueError`, or `TypeError` for a value of a wrong type, with the row or the request in the message. Only one
/// thread at a time may use an object.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct PaddedInputs {
    /// The configuration of the inputs.
    #[pyo3(get)]
    config: Py<NeuronConfig>,
    layout: Arc<Layout>,
    /// Number of buffers per shape.
    buffers: usize,
    memory: Guarded<Memory>,
}

impl PaddedInputs {
    /// Return the compiled shapes.
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Return the buffers for the next fill of a shape. The buffers of a shape are allocated by its first fill.
    pub(crate) fn buffers(&self, py: Python<'_>, shape: Shape) -> PyResult<Arc<Buffers>> {
        let find = |memory: &mut Memory| memory.buffer_sets.get(&shape).map(|set| Arc::clone(&set.buffers[set.next]));
        if let Some(buffers) = self.memory.with(find)? {
            return Ok(buffers);
        }
        let created = (0..self.buffers).map(|_| Buffers::new(py, &self.layout, shape).map(Arc::new));
        let buffers = created.collect::<PyResult<Vec<_>>>()?;
        let mut created = Some(BufferSet { buffers, next: 0 });
        // If another thread has inserted a set in the meantime, this one is dropped after unlocking.
        self.memory.with(|memory| {
            let set = memory.buffer_sets.entry(shape).or_insert_with(|| created.take().expect("taken once"));
            Arc::clone(&set.buffers[set.next])
        })
    }

    /// Advance to the next buffers of a shape, so that the next fill does not overwrite those just filled.
    pub(crate) fn advance(&self, shape: Shape) -> PyResult<()> {
        self.memory.with(|memory| {
            if let Some(set) = memory.buffer_sets.get_mut(&shape) {
                set.next = (set.next + 1) % set.buffers.len();
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
        written?.map_err(|refused| refused.into_py_err(py, step))?;
        self.advance(shape)?;
        let batch = Batch::new(buffers, step.ids.tuple(py), planned.total());
        Ok(batch.emitting((0..planned.rows().len()).map(|at| planned.emits(at))))
    }

    fn fill_decode(
        &self,
        py: Python<'_>,
        step: &Step,
        tokens: &TokensArgument<'_>,
        bucket: Option<i64>,
    ) -> PyResult<Batch> {
        let planned = &step.planned;
        let scheduler = step.scheduler.get();
        let rows = planned.rows().len();
        let context = scheduler.read(|core| core.decode_context(planned))?;
        let shape = self.layout.decode(rows, context.into(), bucket).map_err(|error| to_py(&error))?;
        let unknown = || {
            let unknown = scheduler.read(|core| core.unknown_decodes(planned).map(Iterator::collect))?;
            unknown.map_err(|why| Refused::Unfilled(why).into_py_err(py, step))
        };
        let tokens = tokens.resolve(step.ids.tuple(py).bind(py), unknown)?;
        // After the callable, which may fill a step itself.
        let buffers = self.buffers(py, shape)?;
        let written = scheduler.read(|core| {
            core.check_decodes(planned, tokens.as_deref())?;
            if self.layout.has_vocabulary() {
                for (at, token) in core.decode_tokens(planned, tokens.as_deref()).enumerate() {
                    self.layout.check_token(token, "token_id").map_err(|fault| Refused::Row(at, fault))?;
                }
            }
            buffers.write_decode(core.decode_rows(planned, tokens.as_deref())).map_err(Refused::Unwritten)
        });
        written?.map_err(|refused| refused.into_py_err(py, step))?;
        self.advance(shape)?;
        Ok(Batch::new(buffers, step.ids.tuple(py), planned.total()))
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
        config: &Bound<'_, PyAny>,
        buffers: Option<&Bound<'_, PyAny>>,
        vocab_size: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let config = instance::<NeuronConfig>("config", config)?;
        let reader = FieldReader::Argument;
        let buffers = buffers.map_or(Ok(1), |value| reader.count("buffers", value, 1..=BUFFERS_MAX.into()))?;
        let vocab_size = vocab_size.map(|value| reader.number("vocab_size", value, 1)).transpose()?;
        let layout = Layout::new(config.get().core(), vocab_size).map_err(|error| to_py(&error))?;
        let buffers = usize::try_from(buffers).expect("at most BUFFERS_MAX");
        Ok(Self {
            config: config.clone().unbind(),
            layout: Arc::new(layout),
            buffers,
            memory: Guarded::new(Memory::default()),
        })
    }

    /// Fill the arrays of a `BucketScheduler` step, and return them.
    ///
    /// `tokens` are needed for decode rows with a token that the scheduler does not know, as in a step planned ahead: a
    /// sequence with one entry per row, a token id or `None`; or a callable that takes the ids of these requests and
    /// returns their token ids. `context_bucket` selects a larger context bucket than the rows need.
    ///
    /// Raise `ValueError` for an idle step, a step of another configuration, a step that is too old, and a request with
    /// unknown token ids.
    #[pyo3(signature = (step, tokens=None, *, context_bucket=None))]
    fn fill(
        &self,
        step: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
        context_bucket: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Batch> {
        let (py, step) = (step.py(), instance::<Step>("step", step)?.get());
        let config = &step.scheduler.get().config;
        if !config.is(&self.config) && config.get() != self.config.get() {
            return Err(PyValueError::new_err("step: planned with a different configuration than these inputs"));
        }
        let tokens = TokensArgument::read(tokens);
        let bucket = context_bucket.map(bucket).transpose()?;
        match step.planned.kind() {
            Kind::Idle => Err(PyValueError::new_err("step: idle: expected a step with rows")),
            Kind::Prefill => {
                tokens.refuse_sequence("the tokens of a prefill step are known")?;
                refuse_bucket(bucket)?;
                self.fill_prefill(py, step)
            }
            Kind::Decode => self.fill_decode(py, step, &tokens, bucket),
        }
    }

    /// Fill the arrays of a prefill step with a caller's rows, and return them.
    ///
    /// Raise `ValueError` for a position of at least `max_model_len`, KV blocks that do not hold the row's positions or
    /// exceed those of the longest sequence, a block id outside 1 to `num_blocks` or twice in a row, more rows than
    /// `max_prefills_per_batch`, and more tokens than the last token bucket.
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
        self.advance(shape)?;
        let total: usize = rows.iter().map(|row| row.tokens.len()).sum();
        Ok(Batch::new(buffers, ids, u32::try_from(total).expect("at most a bucket")).emitting(emits))
    }

    /// Fill the arrays of a decode step with a caller's rows, and return them.
    ///
    /// `context_bucket` selects a larger context bucket than the rows need. Raise `ValueError` as `prefill` does, and
    /// for more rows than the last batch bucket.
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
        self.advance(shape)?;
        Ok(Batch::new(buffers, ids, u32::try_from(rows.len()).expect("at most a bucket")))
    }

    /// Fill the arrays of a shape with padding only, and return them.
    ///
    /// A step of padding writes nothing to the KV cache. Use it for warm-up, and for an idle rank while other ranks run
    /// a step. Raise `ValueError` for a shape that is not in `shapes`.
    fn dummy(&self, shape: &Bound<'_, PyAny>) -> PyResult<Batch> {
        let py = shape.py();
        let read = read_shape(shape).filter(|&shape| self.layout.contains(shape));
        let shape = read.ok_or_else(|| {
            PyValueError::new_err(format!("shape: {}: expected one of PaddedInputs.shapes", display(shape)))
        })?;
        let buffers = self.buffers(py, shape)?;
        match shape {
            Shape::Prefill { .. } => buffers.write_prefill([])?,
            Shape::Decode { .. } => buffers.write_decode([])?,
        }
        self.advance(shape)?;
        Ok(Batch::new(buffers, PyTuple::empty(py).unbind(), 0))
    }

    /// Every compiled shape: prefills ascending, then decodes ascending by rows and context.
    #[getter]
    fn shapes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let shapes: Vec<_> = self.layout.shapes().map(|shape| batch::key(py, shape)).collect::<PyResult<_>>()?;
        PyTuple::new(py, shapes)
    }

    fn __repr__(&self) -> String {
        format!("<PaddedInputs: {} shapes>", self.layout.shapes().count())
    }
}

/// Read a context bucket. The core checks that it is compiled.
pub(crate) fn bucket(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    FieldReader::Argument.count("context_bucket", value, i64::MIN..=i64::MAX)
}

/// Check that no context bucket is given for a prefill step: its block tables hold the longest sequence.
pub(crate) fn refuse_bucket(bucket: Option<i64>) -> PyResult<()> {
    bucket.map_or(Ok(()), |bucket| Err(to_py(&Error::invalid("context_bucket", bucket, "None for a prefill step"))))
}

fn read_shape(shape: &Bound<'_, PyAny>) -> Option<Shape> {
    let size = |at| as_int(&shape.get_item(at).ok()?)?.extract::<u32>().ok();
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
    /// A fault of the row at this position.
    Row(usize, Fault),
    /// The arrays could not be written.
    Unwritten(PyErr),
}

impl From<Unfilled> for Refused {
    fn from(why: Unfilled) -> Self {
        Self::Unfilled(why)
    }
}

impl Refused {
    /// Return the exception, with the request ids of `step`.
    fn into_py_err(self, py: Python<'_>, step: &Step) -> PyErr {
        let id = |at| step.ids.id(py, at);
        match self {
            Self::Unfilled(Unfilled::TooOld) => {
                PyValueError::new_err("step: too old: its KV blocks may have been reallocated")
            }
            Self::Unfilled(Unfilled::Unknown(at)) => PyValueError::new_err(format!(
                "request '{}': token_ids: unknown: expected a prompt of token ids, and tokens passed to complete() or \
                 fill()",
                id(at)
            )),
            Self::Unfilled(Unfilled::Mismatch(at, known)) => PyValueError::new_err(format!(
                "request '{}': tokens: a different token: expected None or {known}, which was passed to complete()",
                id(at)
            )),
            Self::Row(at, fault) => PyValueError::new_err(format!("request '{}': {fault}", id(at))),
            Self::Unwritten(error) => error,
        }
    }
}
