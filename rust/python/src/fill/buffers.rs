//! `Buffers`: one set of arrays of a shape.

use std::sync::Arc;

use neuron_sched_core::fill::{DecodeRow, DecodeTensors, Layout, PrefillRow, PrefillTensors, Shape};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use super::memory::Tensor;
use crate::guard::Guarded;

/// The arrays of one shape.
pub(crate) struct Buffers {
    pub(crate) shape: Shape,
    layout: Arc<Layout>,
    common: Common,
    own: Own,
    /// Torch tensors that share the memory, created on first use.
    torch: PyOnceLock<Py<PyDict>>,
    /// Locked while the arrays are written or copied.
    writing: Guarded<()>,
}

/// The arrays of both kinds of steps.
struct Common {
    input_ids: Tensor<i32>,
    positions: Tensor<i64>,
    slot_mapping: Tensor<i64>,
    block_table: Tensor<i32>,
    logits_index: Tensor<i64>,
    sampling_params: Tensor<f32>,
}

/// The arrays of one kind of step.
enum Own {
    Prefill { cached_seq_len: Tensor<i32>, cu_seqlens: Tensor<i32> },
    Decode { context_lens: Tensor<i32> },
}

impl Buffers {
    pub(crate) fn new(py: Python<'_>, layout: &Arc<Layout>, shape: Shape) -> PyResult<Self> {
        let (tokens, rows) = match shape {
            Shape::Prefill { tokens } => (tokens, layout.prefills_max()),
            Shape::Decode { rows, .. } => (rows, rows),
        };
        let common = Common {
            input_ids: Tensor::new(py, &[tokens])?,
            positions: Tensor::new(py, &[tokens])?,
            slot_mapping: Tensor::new(py, &[tokens])?,
            block_table: Tensor::new(py, &[rows, layout.table_width(shape)])?,
            logits_index: Tensor::new(py, &[rows])?,
            sampling_params: Tensor::new(py, &[rows, 3])?,
        };
        let own = match shape {
            Shape::Prefill { .. } => {
                Own::Prefill { cached_seq_len: Tensor::new(py, &[rows, 1])?, cu_seqlens: Tensor::new(py, &[rows + 1])? }
            }
            Shape::Decode { .. } => Own::Decode { context_lens: Tensor::new(py, &[rows])? },
        };
        let (torch, writing) = (PyOnceLock::new(), Guarded::new(()));
        Ok(Self { shape, layout: Arc::clone(layout), common, own, torch, writing })
    }

    /// Return new arrays with the same contents.
    pub(crate) fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        let copy = Self::new(py, &self.layout, self.shape)?;
        let Common { input_ids, positions, slot_mapping, block_table, logits_index, sampling_params } = &self.common;
        self.writing.with(|()| {
            // SAFETY: no other code has the copy yet, and no fill writes to `self` while `writing` is locked.
            unsafe {
                copy.common.input_ids.copy_from(input_ids);
                copy.common.positions.copy_from(positions);
                copy.common.slot_mapping.copy_from(slot_mapping);
                copy.common.block_table.copy_from(block_table);
                copy.common.logits_index.copy_from(logits_index);
                copy.common.sampling_params.copy_from(sampling_params);
                match (&copy.own, &self.own) {
                    (
                        Own::Prefill { cached_seq_len: to, cu_seqlens: to_starts },
                        Own::Prefill { cached_seq_len, cu_seqlens },
                    ) => {
                        to.copy_from(cached_seq_len);
                        to_starts.copy_from(cu_seqlens);
                    }
                    (Own::Decode { context_lens: to }, Own::Decode { context_lens }) => to.copy_from(context_lens),
                    (Own::Prefill { .. }, Own::Decode { .. }) | (Own::Decode { .. }, Own::Prefill { .. }) => {
                        unreachable!("both have the same shape")
                    }
                }
            }
        })?;
        Ok(copy)
    }

    /// Return the arrays by name, in the order of the graph's arguments.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &Py<PyAny>)> {
        let Common { input_ids, positions, slot_mapping, block_table, logits_index, sampling_params } = &self.common;
        let own = match &self.own {
            Own::Prefill { cached_seq_len, cu_seqlens } => {
                [Some(("cached_seq_len", &cached_seq_len.array)), Some(("cu_seqlens", &cu_seqlens.array))]
            }
            Own::Decode { context_lens } => [Some(("context_lens", &context_lens.array)), None],
        };
        let first = [
            ("input_ids", &input_ids.array),
            ("positions", &positions.array),
            ("slot_mapping", &slot_mapping.array),
            ("block_table", &block_table.array),
        ];
        let last = [("logits_index", &logits_index.array), ("sampling_params", &sampling_params.array)];
        first.into_iter().chain(own.into_iter().flatten()).chain(last)
    }

    /// Return the array of that name; `None` if the kind of step has none.
    pub(crate) fn get(&self, name: &str) -> Option<&Py<PyAny>> {
        self.named().find_map(|(other, array)| (other == name).then_some(array))
    }

    /// Return torch tensors that share the memory, by name, as a new dict.
    pub(crate) fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let make = || {
            let views = PyDict::new(py);
            let from_numpy = py.import("torch")?.getattr("from_numpy")?;
            for (name, array) in self.named() {
                views.set_item(name, from_numpy.call1((array,))?)?;
            }
            Ok::<_, PyErr>(views.unbind())
        };
        self.torch.get_or_try_init(py, make)?.bind(py).copy()
    }

    /// Write the rows of a prefill step. Panics if the arrays are of a decode step, or too small.
    pub(crate) fn write_prefill<'r>(&self, rows: impl IntoIterator<Item = PrefillRow<'r>>) -> PyResult<()> {
        let Own::Prefill { cached_seq_len, cu_seqlens } = &self.own else { unreachable!("arrays of a prefill") };
        let Common { input_ids, positions, slot_mapping, block_table, logits_index, sampling_params } = &self.common;
        self.writing.with(|()| {
            // SAFETY: `writing` excludes other writers, and each array is borrowed once. Reading an array in another
            // thread during a fill of the same shape is documented as the caller's fault.
            let mut tensors = unsafe {
                PrefillTensors {
                    input_ids: input_ids.bits(),
                    positions: positions.slice(),
                    slot_mapping: slot_mapping.slice(),
                    block_table: block_table.bits(),
                    cached_seq_len: cached_seq_len.slice(),
                    cu_seqlens: cu_seqlens.slice(),
                    logits_index: logits_index.slice(),
                    sampling_params: sampling_params.slice(),
                }
            };
            tensors.write(&self.layout, rows);
        })
    }

    /// Write the rows of a decode step. Panics if the arrays are of a prefill step, or too small.
    pub(crate) fn write_decode<'r>(&self, rows: impl IntoIterator<Item = DecodeRow<'r>>) -> PyResult<()> {
        let Own::Decode { context_lens } = &self.own else { unreachable!("arrays of a decode step") };
        let Common { input_ids, positions, slot_mapping, block_table, logits_index, sampling_params } = &self.common;
        self.writing.with(|()| {
            // SAFETY: as in `write_prefill`.
            let mut tensors = unsafe {
                DecodeTensors {
                    input_ids: input_ids.bits(),
                    positions: positions.slice(),
                    slot_mapping: slot_mapping.slice(),
                    block_table: block_table.bits(),
                    context_lens: context_lens.slice(),
                    logits_index: logits_index.slice(),
                    sampling_params: sampling_params.slice(),
                }
            };
            tensors.write(&self.layout, rows);
        })
    }
}
