//! `Batch`: the arrays of one step.

use std::sync::Arc;

use neuron_sched_core::fill::Shape;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::buffers::Buffers;

/// The arrays of one step, padded to a compiled shape.
///
/// Sizes in the shapes below: `T` is the token bucket, `P` is `max_prefills_per_batch`, `B` is the batch bucket, `W` is
/// the number of KV blocks of a sequence of `max_model_len` tokens, and `Wc` that of the context bucket.
///
/// The arrays belong to the `PaddedInputs` that filled them. A later fill of the same shape overwrites them; with
/// `buffers=n`, the `n`-th later fill does. Use `copy()` to keep a batch longer.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Batch {
    buffers: Arc<Buffers>,
    /// Request ids of the unpadded rows, in batch order.
    #[pyo3(get)]
    request_ids: Py<PyTuple>,
    /// Unpadded size: number of tokens of a prefill step, number of rows of a decode step.
    #[pyo3(get)]
    num_real_tokens: u32,
    /// Whether each row emits a token; `None` if all do.
    emits: Option<Arc<[bool]>>,
}

impl Batch {
    /// Return a batch in which every row emits a token.
    pub(crate) fn new(buffers: Arc<Buffers>, request_ids: Py<PyTuple>, num_real_tokens: u32) -> Self {
        Self { buffers, request_ids, num_real_tokens, emits: None }
    }

    /// Return the batch with the flags of rows that emit a token.
    pub(crate) fn emitting(self, emits: impl IntoIterator<Item = bool>) -> Self {
        Self { emits: Some(emits.into_iter().collect()), ..self }
    }

    fn array(&self, py: Python<'_>, name: &str) -> Option<Py<PyAny>> {
        self.buffers.get(name).map(|array| array.clone_ref(py))
    }
}

#[pymethods]
impl Batch {
    /// Kind of the step, `"prefill"` or `"decode"`.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.buffers.shape {
            Shape::Prefill { .. } => "prefill",
            Shape::Decode { .. } => "decode",
        }
    }

    /// Key of the compiled graph: `("prefill", tokens)` or `("decode", rows, context)`.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        key(py, self.buffers.shape)
    }

    /// Whether each unpadded row emits a token, as a new list.
    ///
    /// A chunk that does not end its prompt emits none.
    #[getter]
    fn emits(&self, py: Python<'_>) -> Vec<bool> {
        let every = || vec![true; self.request_ids.bind(py).len()];
        self.emits.as_ref().map_or_else(every, |emits| emits.to_vec())
    }

    /// Padded size: the token bucket of a prefill step, the batch bucket of a decode step.
    #[getter]
    fn num_padded_tokens(&self) -> u32 {
        match self.buffers.shape {
            Shape::Prefill { tokens } => tokens,
            Shape::Decode { rows, .. } => rows,
        }
    }

    /// Token ids.
    ///
    /// Shape `[T]` or `[B]`, int32; padding is 0.
    #[getter]
    fn input_ids(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "input_ids")
    }

    /// Position of each token in its sequence.
    ///
    /// Shape `[T]` or `[B]`, int64; padding repeats the last position in a prefill step, and is 0 in a decode step.
    #[getter]
    fn positions(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "positions")
    }

    /// KV slot of each token: block id * block size + offset.
    ///
    /// Shape `[T]` or `[B]`, int64; padding is -1. A kernel that writes the KV cache must skip the padding: as an
    /// index, numpy and torch take -1 for the last slot.
    #[getter]
    fn slot_mapping(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "slot_mapping")
    }

    /// KV blocks of each row, in order of position.
    ///
    /// Shape `[P, W]` or `[B, Wc]`, int32; padding is -1.
    #[getter]
    fn block_table(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "block_table")
    }

    /// Number of tokens of each prompt computed before the step.
    ///
    /// Shape `[P, 1]`, int32; padding rows are 0. `None` for decode steps.
    #[getter]
    fn cached_seq_len(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "cached_seq_len")
    }

    /// Start of each prompt in `input_ids`, followed by the end of the last prompt.
    ///
    /// Shape `[P + 1]`, int32; padding repeats the end. `None` for decode steps.
    #[getter]
    fn cu_seqlens(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "cu_seqlens")
    }

    /// Context length of each row, including the token being computed.
    ///
    /// Shape `[B]`, int32; padding rows are 0. `None` for prefill steps.
    #[getter]
    fn context_lens(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "context_lens")
    }

    /// Index of the last token of each row in `input_ids`.
    ///
    /// Shape `[P]` or `[B]`, int64; padding repeats the last index.
    #[getter]
    fn logits_index(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "logits_index")
    }

    /// `top_k`, `top_p` and `temperature` of each row.
    ///
    /// Shape `[P, 3]` or `[B, 3]`, float32; padding rows are -1, 1, 0.
    #[getter]
    fn sampling_params(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.array(py, "sampling_params")
    }

    /// Return the arrays by name, in the order of the graph's arguments, as a new dict.
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let arrays = PyDict::new(py);
        for (name, array) in self.buffers.named() {
            arrays.set_item(name, array)?;
        }
        Ok(arrays)
    }

    /// Return the arrays as torch tensors that share their memory, as a new dict.
    ///
    /// Raise `ImportError` if torch is not installed.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.buffers.torch(py)
    }

    /// Return a copy with arrays that no later fill overwrites.
    fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        let buffers = Arc::new(self.buffers.copy(py)?);
        let (request_ids, emits) = (self.request_ids.clone_ref(py), self.emits.clone());
        Ok(Self { buffers, request_ids, num_real_tokens: self.num_real_tokens, emits })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<Batch {}: {} of {}>", self.shape(py)?.repr()?, self.num_real_tokens, self.num_padded_tokens()))
    }
}

/// Return the key of a shape as a Python tuple.
pub(crate) fn key(py: Python<'_>, shape: Shape) -> PyResult<Bound<'_, PyTuple>> {
    let key = match shape {
        Shape::Prefill { tokens } => ("prefill", tokens).into_bound_py_any(py)?,
        Shape::Decode { rows, context } => ("decode", rows, context).into_bound_py_any(py)?,
    };
    Ok(key.cast_into()?)
}
