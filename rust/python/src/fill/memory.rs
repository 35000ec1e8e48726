//! One array of numpy's over memory of ours, which whatever a caller does to the array leaves where it is.

use std::alloc::{self, Layout};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;

use numpy::ndarray::{ArrayViewD, IxDyn};
use numpy::{Element, PyArrayDyn};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Alignment of an array in bytes: a cache line, and what device runtimes ask of host memory.
const ALIGNMENT: usize = 64;

/// What the arrays are views of: numpy keeps it alive as their base, and cannot resize what is not its own.
#[pyclass(frozen, module = "neuron_sched._native")]
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is an allocation and nothing else; who may read and write it is said where that is done.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed; `bytes` is above 0.
    fn new(bytes: usize) -> PyResult<Self> {
        let refused = || PyMemoryError::new_err(format!("no memory for an array of {bytes} bytes"));
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| refused())?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        NonNull::new(start).map(|start| Self { start, layout }).ok_or_else(refused)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and no array is left, since each keeps a reference.
        unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// One array.
pub(super) struct Tensor<T> {
    /// What callers get.
    pub(super) array: Py<PyAny>,
    memory: Py<Memory>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element + Copy> Tensor<T> {
    /// Zeros; no size is 0.
    pub(super) fn new(py: Python<'_>, shape: &[u32]) -> PyResult<Self> {
        let sizes: Vec<usize> = shape.iter().map(|&size| size as usize).collect();
        let len = sizes.iter().try_fold(1_usize, |len, &size| len.checked_mul(size));
        let bytes = len.and_then(|len| len.checked_mul(size_of::<T>()));
        let (Some(len), Some(bytes)) = (len, bytes) else {
            return Err(PyMemoryError::new_err(format!("no memory for an array of shape {shape:?}")));
        };
        let memory = Bound::new(py, Memory::new(bytes)?)?;
        // SAFETY: the memory holds that many elements, aligned, zero bits being a value of each numeric type, and
        // stays where it is as long as the array, whose base it is.
        let array = unsafe {
            let elements = ArrayViewD::from_shape_ptr(IxDyn(&sizes), memory.get().start.as_ptr().cast::<T>());
            PyArrayDyn::borrow_from_array(&elements, memory.clone().into_any())
        };
        Ok(Self { array: array.into_any().unbind(), memory: memory.unbind(), len, elements: PhantomData })
    }

    /// The elements, to write.
    ///
    /// # Safety
    /// Nobody else may read or write them meanwhile.
    #[allow(clippy::mut_from_ref, reason = "that there is one at a time is the caller's promise")]
    pub(super) unsafe fn slice(&self) -> &mut [T] {
        // SAFETY: `len` elements were allocated, initialised and aligned for `T`; nobody else has them, as promised.
        unsafe { slice::from_raw_parts_mut(self.memory.get().start.as_ptr().cast::<T>(), self.len) }
    }

    /// Overwrites the elements with those of another array of the same shape.
    ///
    /// # Safety
    /// Nobody may write to either meanwhile, or read this one.
    pub(super) unsafe fn copy_from(&self, other: &Self) {
        // SAFETY: as promised; they are two allocations.
        unsafe { self.slice().copy_from_slice(other.slice()) }
    }
}

impl Tensor<i32> {
    /// As [`Tensor::slice`], as the core has ids: of the same bits without a sign.
    ///
    /// # Safety
    /// As there.
    #[allow(clippy::mut_from_ref, reason = "as there")]
    pub(super) unsafe fn bits(&self) -> &mut [u32] {
        // SAFETY: as promised; every value of the one type is one of the other, of equal size.
        unsafe {
            let numbers = self.slice();
            slice::from_raw_parts_mut(numbers.as_mut_ptr().cast::<u32>(), numbers.len())
        }
    }
}
