//! `Req`: a request of the token-budget scheduler, as its caller sees it.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use neuron_sched_core::mixed::{MixedScheduler, NewMixed, Progress};
use neuron_sched_core::request::Row;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::convert::{count, shown};
use crate::error::to_py;
use crate::guard::Guarded;

/// The core that a scheduler and its requests ask. It holds no Python object, so that no reference cycle
/// leads over it.
pub(super) type Core = Arc<Guarded<MixedScheduler>>;

/// A request of the token-budget `Scheduler`. All counts are tokens.
///
/// `rid` names it and may be anything hashable; no two requests of one name are live in a scheduler together. It
/// ends with its `max_new`-th output. With `prefilled` or `generated` above 0 it goes on from there.
#[pyclass(frozen, weakref, module = "neuron_sched")]
pub(crate) struct Req {
    /// The name, the very object that was given.
    #[pyo3(get)]
    rid: Py<PyAny>,
    /// Length of the prompt.
    #[pyo3(get)]
    prompt_len: u64,
    /// Number of outputs after which the request ends.
    #[pyo3(get)]
    max_new: u64,
    /// Locked for a moment only, also while the core is locked; the core is never locked under it.
    place: Mutex<Place>,
}

/// Where a request is, and with it its counters.
enum Place {
    /// In no scheduler.
    Out(Progress),
    /// About to be live in the scheduler of that core: no other may have it.
    Joining(Core, Progress),
    /// Live; the core knows the counters.
    Live(Core, Row),
}

/// An argument that may be left out, which is not the same as None.
struct Given<'py>(Option<Bound<'py, PyAny>>);

impl<'py> FromPyObject<'_, 'py> for Given<'py> {
    type Error = Infallible;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        Ok(Self(Some(value.to_owned())))
    }
}

impl Given<'_> {
    /// The count that was given, else 0.
    fn count(self, field: &'static str) -> PyResult<u64> {
        self.0.map_or(Ok(0), |value| count(field, &value, 0))
    }
}

#[pymethods]
impl Req {
    #[new]
    #[pyo3(
        signature = (rid, prompt_len, max_new, prefilled=Given(None), generated=Given(None)),
        text_signature = "(rid, prompt_len, max_new, prefilled=0, generated=0)"
    )]
    fn new(
        rid: &Bound<'_, PyAny>,
        prompt_len: &Bound<'_, PyAny>,
        max_new: &Bound<'_, PyAny>,
        prefilled: Given<'_>,
        generated: Given<'_>,
    ) -> PyResult<Self> {
        rid.hash().map_err(|error| {
            if error.is_instance_of::<PyTypeError>(rid.py()) {
                PyTypeError::new_err(format!("rid: {}: expected something hashable", shown(rid)))
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
        let place = Mutex::new(Place::Out(Progress { prefilled, generated }));
        Ok(Self { rid: rid.clone().unbind(), prompt_len, max_new, place })
    }

    /// Tokens of the prompt that are computed; moves when a step is completed.
    #[getter]
    fn prefilled(&self) -> PyResult<u64> {
        self.progress().map(|progress| progress.prefilled)
    }

    /// Outputs generated; moves when a step is completed.
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

    fn place(&self) -> MutexGuard<'_, Place> {
        // Assignments cannot fail half-way.
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> PyResult<Progress> {
        loop {
            let (core, row) = match &*self.place() {
                Place::Out(progress) | Place::Joining(_, progress) => return Ok(*progress),
                Place::Live(core, row) => (Arc::clone(core), *row),
            };
            // The row is gone when another thread ended the request just now; then its place has changed.
            if let Some(progress) = core.with(|core| core.progress(row))? {
                return Ok(progress);
            }
        }
    }

    /// Claims the request for the scheduler of `core`; `None` while it is live in any.
    pub(super) fn join(&self, core: &Core) -> Option<NewMixed> {
        let mut place = self.place();
        let &Place::Out(progress) = &*place else { return None };
        *place = Place::Joining(Arc::clone(core), progress);
        let Progress { prefilled, generated } = progress;
        Some(NewMixed { prompt_len: self.prompt_len, max_new: self.max_new, prefilled, generated })
    }

    /// Gives a claim back.
    pub(super) fn stay_out(&self) {
        let mut place = self.place();
        if let &Place::Joining(_, progress) = &*place {
            *place = Place::Out(progress);
        }
    }

    /// The request is `row` of `core` from now on. Called while the core is locked.
    pub(super) fn enter(&self, core: &Core, row: Row) {
        *self.place() = Place::Live(Arc::clone(core), row);
    }

    /// The request has left its scheduler with these counters. Called while the core is locked.
    pub(super) fn leave(&self, progress: Progress) {
        *self.place() = Place::Out(progress);
    }

    /// The request has generated all its outputs. Called while the core is locked.
    pub(super) fn finish(&self) {
        self.leave(Progress { prefilled: self.prompt_len, generated: self.max_new });
    }

    /// Whether it is live, or about to be, in the scheduler of `core`.
    pub(super) fn belongs_to(&self, core: &Core) -> bool {
        match &*self.place() {
            Place::Out(_) => false,
            Place::Joining(own, _) | Place::Live(own, _) => Arc::ptr_eq(own, core),
        }
    }

    /// Its row, when it is live in the scheduler of `core`.
    pub(super) fn row(&self, core: &Core) -> Option<Row> {
        match &*self.place() {
            Place::Live(own, row) if Arc::ptr_eq(own, core) => Some(*row),
            _ => None,
        }
    }
}
