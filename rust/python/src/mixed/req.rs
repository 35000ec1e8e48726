//! `Req`: a request of the token-budget scheduler.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use neuron_sched_core::mixed::{MixedScheduler, NewMixed, Progress};
use neuron_sched_core::request::Row;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::convert::{count, display};
use crate::error::to_py;
use crate::guard::Guarded;

/// The core that a scheduler shares with its requests. It holds no Python object, so that it is part of no reference
/// cycle.
pub(super) type Core = Arc<Guarded<MixedScheduler>>;

/// A request for the token-budget `Scheduler`. All counts are in tokens.
///
/// `rid` is any hashable value, unique among the live requests of a scheduler. The request finishes after `max_new`
/// output tokens. With `prefilled` or `generated` above 0 it resumes from these counters.
///
/// Counts are ints, or objects with `__index__` such as `numpy.int64`: `prompt_len` and `max_new` from 1 to 2**53,
/// `prefilled` from 0 to `prompt_len`, `generated` from 0 to `max_new - 1`. Raise `ValueError` for a count out of
/// range, and `TypeError` for a value of another type.
#[pyclass(frozen, weakref, module = "neuron_sched")]
pub(crate) struct Req {
    /// Id of the request: the object passed to the constructor.
    #[pyo3(get)]
    rid: Py<PyAny>,
    /// Number of prompt tokens.
    #[pyo3(get)]
    prompt_len: u64,
    /// Number of output tokens after which the request finishes.
    #[pyo3(get)]
    max_new: u64,
    /// Lock order: the core before `membership`. The core is never locked while `membership` is.
    membership: Mutex<Membership>,
}

/// The scheduler that a request belongs to, if any, and the source of its counters.
enum Membership {
    /// The request is in no scheduler and holds its counters itself.
    Detached(Progress),
    /// The request is being added to the scheduler of this core; no other scheduler may add it.
    Claimed(Core, Progress),
    /// The request is live, and the core holds its counters.
    Live(Core, Row),
}

/// An optional argument. In contrast to an `Option`, `None` is not a valid value.
struct OptionalCount<'py>(Option<Bound<'py, PyAny>>);

impl<'py> FromPyObject<'_, 'py> for OptionalCount<'py> {
    type Error = Infallible;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        Ok(Self(Some(value.to_owned())))
    }
}

impl OptionalCount<'_> {
    /// Return the count, or 0 if the argument was omitted.
    fn count(self, field: &'static str) -> PyResult<u64> {
        self.0.map_or(Ok(0), |value| count(field, &value, 0))
    }
}

#[pymethods]
impl Req {
    #[new]
    #[pyo3(
        signature = (rid, prompt_len, max_new, prefilled=OptionalCount(None), generated=OptionalCount(None)),
        text_signature = "(rid, prompt_len, max_new, prefilled=0, generated=0)"
    )]
    fn new(
        rid: &Bound<'_, PyAny>,
        prompt_len: &Bound<'_, PyAny>,
        max_new: &Bound<'_, PyAny>,
        prefilled: OptionalCount<'_>,
        generated: OptionalCount<'_>,
    ) -> PyResult<Self> {
        rid.hash().map_err(|error| {
            if error.is_instance_of::<PyTypeError>(rid.py()) {
                PyTypeError::new_err(format!("rid: {}: expected a hashable value", display(rid)))
            } else {
                error
            }
        })?;
        let request = NewMixed {
            prompt_len: count("prompt_len", prompt_len, 1)?,
            max_new: count("max_new", max_new, 1)?,
            prefilled: prefilled.count("prefilled")?,
            generated: generated.count("generated")?,
        };
        request.check().map_err(|error| to_py(&error))?;
        let NewMixed { prompt_len, max_new, prefilled, generated } = request;
        let membership = Mutex::new(Membership::Detached(Progress { prefilled, generated }));
        Ok(Self { rid: rid.clone().unbind(), prompt_len, max_new, membership })
    }

    /// Number of computed prompt tokens, as of the last completed step.
    #[getter]
    fn prefilled(&self) -> PyResult<u64> {
        self.progress().map(|progress| progress.prefilled)
    }

    /// Number of generated output tokens, as of the last completed step.
    #[getter]
    fn generated(&self) -> PyResult<u64> {
        self.progress().map(|progress| progress.generated)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Progress { prefilled, generated } = self.progress()?;
        let Self { prompt_len, max_new, .. } = self;
        let rid = self.rid.bind(py).repr()?;
        Ok(format!("Req({rid}, {prompt_len}, {max_new}, prefilled={prefilled}, generated={generated})"))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.rid)
    }
}

impl Req {
    pub(super) fn rid(&self) -> &Py<PyAny> {
        &self.rid
    }

    fn membership(&self) -> MutexGuard<'_, Membership> {
        // A poisoned value is valid: the lock is held for single assignments only.
        self.membership.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> PyResult<Progress> {
        loop {
            let (core, row) = match &*self.membership() {
                Membership::Detached(progress) | Membership::Claimed(_, progress) => return Ok(*progress),
                Membership::Live(core, row) => (Arc::clone(core), *row),
            };
            // The core does not know the row if another thread has just ended the request. Its membership has changed
            // then, and the next iteration reads it again.
            if let Some(progress) = core.with(|core| core.progress(row))? {
                return Ok(progress);
            }
        }
    }

    /// Claim the request for the scheduler of `core`. Returns `None` if it is claimed or live.
    pub(super) fn claim(&self, core: &Core) -> Option<NewMixed> {
        let mut membership = self.membership();
        let &Membership::Detached(progress) = &*membership else { return None };
        *membership = Membership::Claimed(Arc::clone(core), progress);
        let Progress { prefilled, generated } = progress;
        Some(NewMixed { prompt_len: self.prompt_len, max_new: self.max_new, prefilled, generated })
    }

    /// Undo a claim.
    pub(super) fn unclaim(&self) {
        let mut membership = self.membership();
        if let &Membership::Claimed(_, progress) = &*membership {
            *membership = Membership::Detached(progress);
        }
    }

    /// Mark the request as live with a row of `core`. Called while the core is locked.
    pub(super) fn set_live(&self, core: &Core, row: Row) {
        *self.membership() = Membership::Live(Arc::clone(core), row);
    }

    /// Mark the request as removed from its scheduler, with its counters. Called while the core is locked.
    pub(super) fn set_detached(&self, progress: Progress) {
        *self.membership() = Membership::Detached(progress);
    }

    /// Mark the request as removed with all its outputs generated. Called while the core is locked.
    pub(super) fn set_finished(&self) {
        self.set_detached(Progress { prefilled: self.prompt_len, generated: self.max_new });
    }

    /// Return whether the request is live in the scheduler of `core`, or claimed for it.
    pub(super) fn belongs_to(&self, core: &Core) -> bool {
        match &*self.membership() {
            Membership::Detached(_) => false,
            Membership::Claimed(own, _) | Membership::Live(own, _) => Arc::ptr_eq(own, core),
        }
    }

    /// Return the row of the request if it is live in the scheduler of `core`.
    pub(super) fn row(&self, core: &Core) -> Option<Row> {
        match &*self.membership() {
            Membership::Live(own, row) if Arc::ptr_eq(own, core) => Some(*row),
            _ => None,
        }
    }
}
