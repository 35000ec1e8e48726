//! The memory of a shape: numpy's, so that arrays outlive everything here.

use std::sync::{Arc, Mutex, PoisonError};

use neuron_sched_core::fill::{DecodeRow, DecodeTensors, Layout, PrefillRow, PrefillTensors, Shape};
use numpy::{Element, PyArray1, PyArrayMethods};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PySlice};

/// Alignment of an array in bytes: a cache line, and what device runtimes ask of host memory.
const ALIGNMENT: usize = 64;

/// One array.
pub(crate) struct Tensor<T: Element> {
    /// What callers get.
    array: Py<PyAny>,
    /// The same memory in one dimension. Nobody else has it, so nobody can change what it is a view of.
    flat: Py<PyArray1<T>>,
}

impl<T: Element> Tensor<T> {
    fn new(py: Python<'_>, shape: &[u32]) -> PyResult<Self> {
        let len = shape.iter().map(|&size| size as usize).product::<usize>();
        let spare = ALIGNMENT / size_of::<T>();
        let memory = PyArray1::<T>::zeros(py, [len + spare], false);
        let first = memory.data().align_offset(ALIGNMENT);
        let index = |at: usize| isize::try_from(at).expect("an index of an array");
        let slice = PySlice::new(py, index(first), index(first + len), 1);
        let flat = memory.as_any().get_item(slice)?.cast_into::<PyArray1<T>>()?;
        let array = flat.call_method1("reshape", (shape.to_vec(),))?;
        Ok(Self { array: array.unbind(), flat: flat.unbind() })
    }

    /// The elements, to write.
    ///
    /// # Safety
    /// Nobody else may read or write them meanwhile.
    unsafe fn slice<'a>(&'a self, py: Python<'a>) -> PyResult<&'a mut [T]> {
        // SAFETY: the memory is numpy's and stays where it is while `flat` lives: a view cannot be resized, and
        // what it is a view of was never handed out. That nobody else uses it is the caller's promise.
        unsafe { self.flat.bind(py).as_slice_mut() }.map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }
}

/// The arrays of one shape.
pub(crate) struct Buffers {
    pub(crate) shape: Shape,
    layout: Arc<Layout>,
    common: Common,
    own: Own,
    /// Views by torch, made when first asked for.
    torch: PyOnceLock<Py<PyDict>>,
    /// Held while the arrays are written, so that two threads never do it at once.
    writing: Mutex<()>,
}

/// What both kinds have.
struct Common {
    input_ids: Tensor<i32>,
    positions: Tensor<i64>,
    slot_mapping: Tensor<i64>,
    block_table: Tensor<i32>,
    logits_index: Tensor<i64>,
    sampling_params: Tensor<f32>,
}

/// What one kind has.
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
        let (torch, writing) = (PyOnceLock::new(), Mutex::new(()));
        Ok(Self { shape, layout: Arc::clone(layout), common, own, torch, writing })
    }

    /// Arrays of their own with the same contents.
    pub(crate) fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        let copy = Self::new(py, &self.layout, self.shape)?;
        for ((_, to), (_, from)) in copy.named().into_iter().zip(self.named()) {
            to.bind(py).set_item(py.Ellipsis(), from)?;
        }
        Ok(copy)
    }

    /// The arrays by name, in the order in which a graph takes them.
    pub(crate) fn named(&self) -> Vec<(&'static str, &Py<PyAny>)> {
        let Common { input_ids, positions, slot_mapping, block_table, logits_index, sampling_params } = &self.common;
        let mut named = vec![
            ("input_ids", &input_ids.array),
            ("positions", &positions.array),
            ("slot_mapping", &slot_mapping.array),
            ("block_table", &block_table.array),
        ];
        match &self.own {
            Own::Prefill { cached_seq_len, cu_seqlens } => {
                named.push(("cached_seq_len", &cached_seq_len.array));
                named.push(("cu_seqlens", &cu_seqlens.array));
            }
            Own::Decode { context_lens } => named.push(("context_lens", &context_lens.array)),
        }
        named.push(("logits_index", &logits_index.array));
        named.push(("sampling_params", &sampling_params.array));
        named
    }

    /// The array of that name; `None` where the kind has none.
    pub(crate) fn get(&self, name: &str) -> Option<&Py<PyAny>> {
        self.named().into_iter().find_map(|(other, array)| (other == name).then_some(array))
    }

    /// Tensors that share the memory, by name, in a new dict.
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

    /// Writes a prefill into the arrays, which are of that kind and large enough.
    pub(crate) fn write_prefill<'r>(
        &self,
        py: Python<'_>,
        rows: impl IntoIterator<Item = PrefillRow<'r>>,
    ) -> PyResult<()> {
        let Own::Prefill { cached_seq_len, cu_seqlens } = &self.own else { unreachable!("arrays of a prefill") };
        let Common { input_ids, positions, slot_mapping, block_table, logits_index, sampling_params } = &self.common;
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: no other writer while `writing` is held, and each array is asked for once. A caller who reads
        // an array in another thread while it fills the shape again was told not to.
        let mut tensors = unsafe {
            PrefillTensors {
                input_ids: input_ids.slice(py)?,
                positions: positions.slice(py)?,
                slot_mapping: slot_mapping.slice(py)?,
                block_table: block_table.slice(py)?,
                cached_seq_len: cached_seq_len.slice(py)?,
                cu_seqlens: cu_seqlens.slice(py)?,
                logits_index: logits_index.slice(py)?,
                sampling_params: sampling_params.slice(py)?,
            }
        };
        tensors.write(&self.layout, rows);
        Ok(())
    }

    /// Writes a decode step into the arrays, which are of that kind and large enough.
    pub(crate) fn write_decode<'r>(
        &self,
        py: Python<'_>,
        rows: impl IntoIterator<Item = DecodeRow<'r>>,
    ) -> PyResult<()> {
        let Own::Decode { context_lens } = &self.own else { unreachable!("arrays of a decode step") };
        let Common { input_ids, positions, slot_mapping, block_table, logits_index, sampling_params } = &self.common;
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `write_prefill`.
        let mut tensors = unsafe {
            DecodeTensors {
                input_ids: input_ids.slice(py)?,
                positions: positions.slice(py)?,
                slot_mapping: slot_mapping.slice(py)?,
                block_table: block_table.slice(py)?,
                context_lens: context_lens.slice(py)?,
                logits_index: logits_index.slice(py)?,
                sampling_params: sampling_params.slice(py)?,
            }
        };
        tensors.write(&self.layout, rows);
        Ok(())
    }
}
