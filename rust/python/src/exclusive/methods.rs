//! The Python methods of `BucketScheduler`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use neuron_sched_core::exclusive::{Completion, ExclusiveScheduler, Options, Tokens};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::batch_ids::BatchIds;
use super::outcomes::Outcomes;
use super::request::{Request, RequestState};
use super::scheduler::{BucketScheduler, NamedCore};
use super::step::Step;
use crate::config::NeuronConfig;
use crate::convert::{instance, read_tokens};
use crate::decide::Explanation;
use crate::error::{of_request, to_py};
use crate::guard::Guarded;

#[pymethods]
impl BucketScheduler {
    #[new]
    fn new(config: &Bound<'_, PyAny>) -> PyResult<Self> {
        let config = instance::<NeuronConfig>("config", config)?;
        let core = ExclusiveScheduler::new(config.get().core());
        let named = Guarded::new(NamedCore { core, ids: Vec::new(), rows: HashMap::new() });
        Ok(Self { named, last_ids: Mutex::new(None), config: config.clone().unbind() })
    }

    /// Queue a request.
    ///
    /// Raise `ValueError` and change nothing if a live request has the same id, if the prompt is longer than
    /// `max_model_len`, or if the worst case of the request is larger than the whole KV cache.
    fn add(&self, request: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = request.py();
        let (id, request) = instance::<Request>("request", request)?.get().parts(py);
        let text = id.bind(py).to_str()?.to_owned();
        self.named.with(|named| {
            let known = named.rows.get(&text).and_then(|&row| named.core.view(row));
            if known.is_some_and(|view| view.status.is_live()) {
                return Err(PyValueError::new_err(format!("id: '{text}': expected an id that no live request has")));
            }
            let row = named.core.add(request).map_err(|error| of_request(&text, &error))?;
            if named.ids.len() <= row.index() {
                named.ids.resize_with(row.index() + 1, || None);
            }
            named.ids[row.index()] = Some(id);
            named.rows.insert(text, row);
            Ok(())
        })?
    }

    /// Plan the next step: admit requests and allocate KV blocks.
    ///
    /// A step that is not completed may be planned again, which voids the earlier plan. `throttle_prefills` plans no
    /// prefill while a request decodes. `ahead` plans one step beyond the step in flight, assuming that each of its
    /// emitting rows emits a token. Raise `ValueError` if a step is planned ahead already.
    #[pyo3(signature = (throttle_prefills=false, *, ahead=false))]
    fn schedule(slf: &Bound<'_, Self>, throttle_prefills: bool, ahead: bool) -> PyResult<Step> {
        let (py, this) = (slf.py(), slf.get());
        let last = this.last_ids();
        let planned = this.named.with(|named| {
            let step = Arc::clone(named.core.schedule(Options { throttle_prefills, ahead })?);
            let finished = named.ids(py, step.finished());
            let same = last.as_ref().is_some_and(|ids| ids.rows == step.rows());
            let new = if same { None } else { Some(named.ids(py, step.rows())) };
            Ok((step, finished, new))
        })?;
        let (step, finished, new) = planned.map_err(|error| to_py(&error))?;
        let ids = match (new, last) {
            (None, Some(ids)) => ids,
            (new, _) => {
                let ids = Arc::new(BatchIds::new(py, step.rows(), new.unwrap_or_default())?);
                let mut last = this.last_ids.lock().unwrap_or_else(PoisonError::into_inner);
                let before = last.replace(Arc::clone(&ids));
                drop(last);
                drop(before);
                ids
            }
        };
        Ok(Step { scheduler: slf.clone().unbind(), planned: step, ids, finished })
    }

    /// Complete the step that is due: append its tokens, and finish requests.
    ///
    /// `tokens` has one entry per scheduled request: the token id, or `None` for a row that emits nothing. It may be
    /// omitted if every prompt was given as a length. Raise `ValueError` and change nothing for a step that is not due,
    /// or for tokens that do not match its rows.
    #[pyo3(signature = (step, tokens=None))]
    fn complete(
        slf: &Bound<'_, Self>,
        step: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Outcomes> {
        let (py, step) = (slf.py(), instance::<Step>("step", step)?.get());
        if !step.scheduler.is(slf) {
            return Err(PyValueError::new_err("step: planned by another scheduler"));
        }
        let tokens = tokens.map(|tokens| read_tokens(tokens, step.planned.rows().len())).transpose()?;
        let tokens = tokens.as_deref().map_or(Tokens::LeftOut, Tokens::Given);
        let mut removed = Vec::new();
        let completion = slf.get().named.with(|named| -> PyResult<Arc<Completion>> {
            let completion = named.core.complete(step.planned.id(), tokens).map(Arc::clone);
            let completion = completion.map_err(|error| to_py(&error))?;
            named.remove_reported(py, &mut removed)?;
            Ok(completion)
        })??;
        Ok(Outcomes { completion, ids: Arc::clone(&step.ids) })
    }

    /// Cancel a live request and free its KV blocks. Return `False` if no live request has the id.
    fn cancel(&self, id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let text = instance::<PyString>("id", id)?.to_str()?;
        self.named.with(|named| named.rows.get(text).copied().is_some_and(|row| named.core.cancel(row)))
    }

    /// Return a snapshot of a request.
    ///
    /// Raise `KeyError` for an unknown id. The id of a finished or cancelled request is unknown once a completed step
    /// has listed it in `Step.finished_ids`.
    fn request(&self, id: &Bound<'_, PyAny>) -> PyResult<RequestState> {
        let (py, text) = (id.py(), instance::<PyString>("id", id)?.to_str()?);
        let state = self.named.with(|named| {
            let row = named.rows.get(text).copied()?;
            Some(RequestState::new(named.id(py, row), &named.core.view(row)?))
        })?;
        state.ok_or_else(|| PyKeyError::new_err(id.clone().unbind()))
    }

    /// Return why the head of the queue waits. `None` if the queue is empty.
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

    /// Check the invariants of the scheduler. Raise `RuntimeError` if one is violated, which is always a bug.
    fn check(&self) -> PyResult<()> {
        self.read(ExclusiveScheduler::check)?.map_err(|error| to_py(&error))
    }

    /// `"idle"` if no request waits or runs, else the kind of the last completed step.
    #[getter]
    fn state(&self) -> PyResult<&'static str> {
        self.read(|core| core.state().name())
    }

    /// Number of waiting requests.
    #[getter]
    fn num_waiting(&self) -> PyResult<usize> {
        self.read(ExclusiveScheduler::num_waiting)
    }

    /// Number of running requests; each holds one batch slot.
    #[getter]
    fn num_running(&self) -> PyResult<usize> {
        self.read(ExclusiveScheduler::num_running)
    }

    /// Number of KV blocks that can be allocated: free ones, and cached ones that no request uses.
    #[getter]
    fn free_blocks(&self) -> PyResult<u32> {
        self.read(ExclusiveScheduler::free_blocks)
    }

    /// Number of KV blocks reserved for running requests: the sum of their worst cases.
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
