//! `Batch`: the arrays of one step, and what they hold.

use std::sync::Arc;

use neuron_sched_core::fill::Shape;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::buffers::Buffers;

/// The arrays of one step, in a compiled shape.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Batch {
    buffers: Arc<Buffers>,
    /// The requests of the real rows, in batch order.
    #[pyo3(get)]
    request_ids: Py<PyTuple>,
    /// Real tokens of a prefill, real rows of a decode step.
    #[pyo3(get)]
    num_real_tokens: u32,
    /// By row; `None` when every row emits.
    emits: Option<Arc<[bool]>>,
}

impl Batch {
    /// A batch whose rows all emit a token.
    pub(crate) fn new(buffers: Arc<Buffers>, request_ids: Py<PyTuple>, num_real_tokens: u32) -> Self {
        Self { buffers, request_ids, num_real_tokens, emits: None }
    }

    /// The same with rows that emit nothing.
    pub(crate) fn emitting(self, emits: impl IntoIterator<Item = bool>) -> Self {
        Self { emits: Some(emits.into_iter().collect()), ..self }
    }

    fn array(&self, py: Python<'_>, name: &str) -> Option<Py<PyAny>> {
        self.buffers.get(name).map(|array| array.clone_ref(py))
    }
}

#[pymethods]
impl Batch {
    /// `"prefill"` or `"decode"`.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.buffers.shape {
            Shape::Prefill { .. } => "prefill",
            Shape::Decode { .. } => "decode",
        }
    }

    /// The key of the compiled graph: `("prefill", tokens)` or `("decode", rows, context)`.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        key(py, self.buffers.shape)
    }

    /// Whether each real row emits a token: all do but chunks in the middle of a prompt; a new list.
    #[getter]
    fn emits(&self, py: Python<'_>) -> Vec<bool> {
        let every = || vec![true; self.request_ids.bind(py).len()];
        self.emits.as_ref().map_or_else(every, |emits| emits.to_vec())
    }

    /// The compiled size: tokens of a prefill, rows of a decode step, padding included.
    #[getter]
    fn num_padded_tokens(&self) -> u32 {
        match self.buffers.shape {
            Shape::Prefill { tokens } => tokens,
            Shape::Decode { rows, .. } => rows,
        }
    }

    /// Token ids, `int32 [T]` or `[B]`; padding 0.
    #[getter]
    fn input_ids(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "input_ids")
    }

    /// Positions in the sequence, `int64`, as `input_ids`; padding of a prefill repeats the last, of a decode is 0.
    #[getter]
    fn positions(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "positions")
    }

    /// KV slots to write, `int64`, as `input_ids`: block id * block size + offset; padding -1, which is no index.
    #[getter]
    fn slot_mapping(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "slot_mapping")
    }

    /// KV blocks of each row in order of position, `int32 [P, W]` or `[B, Wc]`; padding -1.
    #[getter]
    fn block_table(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "block_table")
    }

    /// Tokens of each prompt that were computed before, `int32 [P, 1]`; padding 0. None for a decode step.
    #[getter]
    fn cached_seq_len(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "cached_seq_len")
    }

    /// Where each prompt starts, and the end, `int32 [P + 1]`; padding repeats the end. None for a decode step.
    #[getter]
    fn cu_seqlens(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "cu_seqlens")
    }

    /// Tokens that each row looks back on, its own included, `int32 [B]`; padding 0. None for a prefill.
    #[getter]
    fn context_lens(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "context_lens")
    }

    /// Where the last token of each row is in `input_ids`, `int64 [P]` or `[B]`; padding repeats the last.
    #[getter]
    fn logits_index(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "logits_index")
    }

    /// `top_k`, `top_p`, `temperature` of each row, `float32 [P, 3]` or `[B, 3]`; padding -1, 1, 0.
    #[getter]
    fn sampling_params(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "sampling_params")
    }

    /// The arrays that are there, by name, in the order in which a graph takes them; a new dict.
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let arrays = PyDict::new(py);
        for (name, array) in self.buffers.named() {
            arrays.set_item(name, array)?;
        }
        Ok(arrays)
    }

    /// As `arrays()`, but torch tensors, which share the memory; `ImportError` without torch.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.buffers.torch(py)
    }

    /// The same in memory of its own, which no fill writes to.
    fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        let buffers = Arc::new(self.buffers.copy(py)?);
        let (request_ids, emits) = (self.request_ids.clone_ref(py), self.emits.clone());
        Ok(Self { buffers, request_ids, num_real_tokens: self.num_real_tokens, emits })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<Batch {}: {} of {}>", self.shape(py)?.repr()?, self.num_real_tokens, self.num_padded_tokens()))
    }
}

/// The key of a shape, as callers know it.
pub(crate) fn key(py: Python<'_>, shape: Shape) -> PyResult<Bound<'_, PyTuple>> {
    let key = match shape {
        Shape::Prefill { tokens } => ("prefill", tokens).into_bound_py_any(py)?,
        Shape::Decode { rows, context } => ("decode", rows, context).into_bound_py_any(py)?,
    };
    Ok(key.cast_into()?)
}
