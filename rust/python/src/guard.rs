//! Shared access to a core object from any thread, and the conversion of panics to exceptions.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use pyo3::PyResult;
use pyo3::exceptions::PyRuntimeError;

/// A core object behind a lock. A panic inside [`Guarded::with`] is a bug of the core: it is raised as `RuntimeError`,
/// and every later call is refused, because the state of the object is unknown.
#[derive(Debug)]
pub(crate) struct Guarded<T>(Mutex<T>);

impl<T> Guarded<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Call `f` with the object. `f` must not run Python code, which could call this object again and deadlock.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut value = self.0.lock().map_err(|PoisonError { .. }| ())?;
            Ok(f(&mut value))
        }));
        match outcome {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(())) => Err(PyRuntimeError::new_err("an earlier internal error left this object unusable")),
            Err(_) => Err(PyRuntimeError::new_err("internal error of neuron-sched; this object is now unusable")),
        }
    }

    /// Call `f` with the object, or return `None` if it is locked: a garbage collection must not wait for a lock.
    pub(crate) fn try_with<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.0.try_lock().ok().map(|mut value| f(&mut value))
    }
}
