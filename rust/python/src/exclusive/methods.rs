//! The Python methods of `BucketScheduler`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use neuron_sched_core::exclusive::{Completion, ExclusiveScheduler, Options, Tokens};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::names::Names;
use super::outcomes::Outcomes;
use super::request::{Request, RequestState};
use super::scheduler::{BucketScheduler, Named};
use super::step::Step;
use crate::config::NeuronConfig;
use crate::convert::read_tokens;
use crate::decide::Explanation;
use crate::error::{of_request, to_py};
use crate::guard::Guarded;

#[pymethods]
impl BucketScheduler {
    #[new]
    fn new(config: Bound<'_, NeuronConfig>) -> Self {
        let core = ExclusiveScheduler::new(config.get().core());
        let named = Guarded::new(Named { core, ids: Vec::new(), rows: HashMap::new() });
        Self { named, names: Mutex::new(None), config: config.unbind() }
    }

    /// Queues a request.
    ///
    /// `ValueError`, and nothing is changed, when its id is live, its prompt is longer than `max_model_len`, or its
    /// worst case is larger than the whole KV cache.
    fn add(&self, py: Python<'_>, request: &Bound<'_, Request>) -> PyResult<()> {
        let (id, request) = request.get().parts(py);
        let name = id.bind(py).to_str()?.to_owned();
        self.named.with(|named| {
            let known = named.rows.get(&name).and_then(|&row| named.core.view(row));
            if known.is_some_and(|view| view.status.is_live()) {
                return Err(PyValueError::new_err(format!("id: '{name}': expected an id that no live request has")));
            }
            let row = named.core.add(request).map_err(|error| of_request(&name, &error))?;
            if named.ids.len() <= row.index() {
                named.ids.resize_with(row.index() + 1, || None);
            }
            named.ids[row.index()] = Some(id);
            named.rows.insert(name, row);
            Ok(())
        })?
    }

    /// Plans the next step: admits and allocates at once, changes nothing else.
    ///
    /// A step that was not completed may be planned again; the older one is then void. `throttle_prefills` holds
    /// prefills back while something decodes. `ahead` plans one step beyond the pending one, assuming that each of
    /// its emitting rows emits; `ValueError` when one is planned ahead already.
    #[pyo3(signature = (throttle_prefills=false, *, ahead=false))]
    fn schedule(slf: &Bound<'_, Self>, throttle_prefills: bool, ahead: bool) -> PyResult<Step> {
        let (py, this) = (slf.py(), slf.get());
        let last = this.last_names();
        let planned = this.named.with(|named| {
            let step = Arc::clone(named.core.schedule(Options { throttle_prefills, ahead })?);
            let finished = named.ids(py, step.finished());
            let same = last.as_ref().is_some_and(|names| names.rows == step.rows());
            let ids = if same { None } else { Some(named.ids(py, step.rows())) };
            Ok((step, finished, ids))
        })?;
        let (step, finished, ids) = planned.map_err(|error| to_py(&error))?;
        let names = match (ids, last) {
            (None, Some(names)) => names,
            (ids, _) => {
                let names = Arc::new(Names::new(py, step.rows(), ids.unwrap_or_default())?);
                let mut last = this.names.lock().unwrap_or_else(PoisonError::into_inner);
                let before = last.replace(Arc::clone(&names));
                drop(last);
                drop(before);
                names
            }
        };
        Ok(Step { scheduler: slf.clone().unbind(), planned: step, names, finished })
    }

    /// Takes the result of the step that is due, and moves all counts on.
    ///
    /// `tokens` has one entry a scheduled request: the token id, or None for a row that emits nothing. It may be
    /// left out for prompts given as lengths.
    #[pyo3(signature = (step, tokens=None))]
    fn complete(
        slf: &Bound<'_, Self>,
        step: &Bound<'_, Step>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Outcomes> {
        let (py, step) = (slf.py(), step.get());
        if !step.scheduler.is(slf) {
            return Err(PyValueError::new_err("step: planned by another scheduler"));
        }
        let tokens = tokens.map(|tokens| read_tokens(tokens, step.planned.rows().len())).transpose()?;
        let tokens = tokens.as_deref().map_or(Tokens::LeftOut, Tokens::Given);
        let mut gone = Vec::new();
        let completion = slf.get().named.with(|named| -> PyResult<Arc<Completion>> {
            let completion = named.core.complete(step.planned.id(), tokens).map(Arc::clone);
            let completion = completion.map_err(|error| to_py(&error))?;
            named.forget_delivered(py, &mut gone)?;
            Ok(completion)
        })??;
        Ok(Outcomes { completion, names: Arc::clone(&step.names) })
    }

    /// Ends a request at once and frees its KV blocks; False when no live request has the id.
    fn cancel(&self, id: &Bound<'_, PyString>) -> PyResult<bool> {
        let name = id.to_str()?;
        self.named.with(|named| named.rows.get(name).copied().is_some_and(|row| named.core.cancel(row)))
    }

    /// A snapshot of a request; `KeyError` once its end was delivered by a completed step.
    fn request(&self, id: &Bound<'_, PyString>) -> PyResult<RequestState> {
        let (py, name) = (id.py(), id.to_str()?);
        let state = self.named.with(|named| {
            let row = named.rows.get(name).copied()?;
            Some(RequestState::new(named.id(py, row), &named.core.view(row)?))
        })?;
        state.ok_or_else(|| PyKeyError::new_err(id.clone().unbind()))
    }

    /// Why the head of the queue waits, before the next `schedule()`; None when nothing waits.
    fn explain(&self, py: Python<'_>) -> PyResult<Option<Explanation>> {
        let found = self.named.with(|named| {
            let explanation = named.core.explain()?;
            Some((named.id(py, explanation.row), explanation))
        })?;
        Ok(found.map(|(id, explanation)| Explanation {
            id,
            reason: PyString::intern(py, explanation.wait.name()).unbind(),
            needed: explanation.needed,
            reserved: explanation.reserved,
            usable: explanation.usable,
        }))
    }

    /// Verifies the conservation laws; `RuntimeError` tells of a fault of the scheduler itself.
    fn check(&self) -> PyResult<()> {
        self.read(ExclusiveScheduler::check)?.map_err(|error| to_py(&error))
    }

    /// Idle when nothing waits and nothing runs, else what the last completed step did.
    #[getter]
    fn state(&self) -> PyResult<&'static str> {
        self.read(|core| core.state().name())
    }

    /// Requests in the queue.
    #[getter]
    fn num_waiting(&self) -> PyResult<usize> {
        self.read(ExclusiveScheduler::num_waiting)
    }

    /// Requests that hold a slot.
    #[getter]
    fn num_running(&self) -> PyResult<usize> {
        self.read(ExclusiveScheduler::num_running)
    }

    /// KV blocks that are free, or cached but used by nobody.
    #[getter]
    fn free_blocks(&self) -> PyResult<u32> {
        self.read(ExclusiveScheduler::free_blocks)
    }

    /// KV blocks that running requests may need at worst.
    #[getter]
    fn reserved_blocks(&self) -> PyResult<u32> {
        self.read(ExclusiveScheduler::reserved_blocks)
    }

    fn __repr__(&self) -> PyResult<String> {
        let (waiting, running, free) =
            self.read(|core| (core.num_waiting(), core.num_running(), core.free_blocks()))?;
        Ok(format!("<BucketScheduler: {waiting} waiting, {running} running, {free} free blocks>"))
    }
}
