//! `Tensor`: a numpy array over memory allocated here, which stays valid whatever a caller does to the array.

use std::alloc::{self, Layout};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;

use numpy::ndarray::{ArrayViewD, IxDyn};
use numpy::{Element, PyArrayDyn};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Alignment of an array in bytes: a cache line, which device runtimes require of host memory too.
const ALIGNMENT: usize = 64;

/// The memory of an array. As the array's base it is kept alive by numpy, and numpy cannot resize it.
#[pyclass(frozen, module = "neuron_sched._native")]
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the struct only owns an allocation; the rules of access are stated where the memory is read and written.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocate zeroed memory; `bytes` is above 0.
    fn new(bytes: usize) -> PyResult<Self> {
        let refused = || PyMemoryError::new_err(format!("cannot allocate an array of {bytes} bytes"));
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| refused())?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        NonNull::new(start).map(|start| Self { start, layout }).ok_or_else(refused)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout, and no array is left, since an array keeps a reference.
        unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// A numpy array and its memory.
pub(super) struct Tensor<T> {
    /// The array that callers get.
    pub(super) array: Py<PyAny>,
    memory: Py<Memory>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element + Copy> Tensor<T> {
    /// Return an array of zeros; every size is above 0.
    pub(super) fn new(py: Python<'_>, shape: &[u32]) -> PyResult<Self> {
        let sizes: Vec<usize> = shape.iter().map(|&size| size as usize).collect();
        let len = sizes.iter().try_fold(1_usize, |len, &size| len.checked_mul(size));
        let bytes = len.and_then(|len| len.checked_mul(size_of::<T>()));
        let (Some(len), Some(bytes)) = (len, bytes) else {
            return Err(PyMemoryError::new_err(format!("cannot allocate an array of shape {shape:?}")));
        };
        let memory = Bound::new(py, Memory::new(bytes)?)?;
        // SAFETY: the memory holds `len` aligned elements, zero bits are a valid value of every numeric type, and the
        // memory lives as long as the array, because it is the array's base.
        let array = unsafe {
            let elements = ArrayViewD::from_shape_ptr(IxDyn(&sizes), memory.get().start.as_ptr().cast::<T>());
            PyArrayDyn::borrow_from_array(&elements, memory.clone().into_any())
        };
        Ok(Self { array: array.into_any().unbind(), memory: memory.unbind(), len, elements: PhantomData })
    }

    /// Return the elements for writing.
    ///
    /// # Safety
    /// No other code may read or write the elements while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees exclusive access")]
    pub(super) unsafe fn slice(&self) -> &mut [T] {
        // SAFETY: `len` elements are allocated, initialized and aligned for `T`; the caller guarantees exclusive
        // access.
        unsafe { slice::from_raw_parts_mut(self.memory.get().start.as_ptr().cast::<T>(), self.len) }
    }

    /// Overwrite the elements with those of another array of the same shape.
    ///
    /// # Safety
    /// No other code may access this array or write to `other` during the call.
    pub(super) unsafe fn copy_from(&self, other: &Self) {
        // SAFETY: guaranteed by the caller; the two arrays have separate allocations.
        unsafe { self.slice().copy_from_slice(other.slice()) }
    }
}

impl Tensor<i32> {
    /// Return the elements for writing, with their bits as `u32`, the core's type of ids.
    ///
    /// # Safety
    /// No other code may read or write the elements while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees exclusive access")]
    pub(super) unsafe fn bits(&self) -> &mut [u32] {
        // SAFETY: guaranteed by the caller; `i32` and `u32` have the same size, and every bit pattern is valid.
        unsafe {
            let numbers = self.slice();
            slice::from_raw_parts_mut(numbers.as_mut_ptr().cast::<u32>(), numbers.len())
        }
    }
}
