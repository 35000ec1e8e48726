//! `replay`: runs the core's replay without the GIL.

use std::ops::ControlFlow;

use neuron_sched_core::sim::{self, Arrival, Options, Progress, Scheduler};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySet};

use super::cost::Cost;
use super::report::ReplayReport;
use super::request::TraceRequest;
use crate::config::NeuronConfig;
use crate::convert::instance;
use crate::error::to_py;
use crate::guard::Guarded;

/// Replay a workload; internal to `neuron_sched.simulate.replay`.
///
/// Other Python threads run during the replay. `progress` is called with the number of finished or refused requests and
/// the number of all requests; an exception that it raises ends the replay.
#[pyfunction]
#[pyo3(signature = (requests, config, cost, scheduler, record_steps, progress))]
pub(crate) fn replay(
    py: Python<'_>,
    requests: &Bound<'_, PyList>,
    config: &NeuronConfig,
    cost: &Cost,
    scheduler: &str,
    record_steps: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<ReplayReport> {
    let Some(scheduler) = Scheduler::from_name(scheduler) else {
        return Err(PyValueError::new_err(format!("scheduler: '{scheduler}': expected 'bucket' or 'mixed'")));
    };
    let requests = read_requests(requests)?;
    if record_steps {
        check_unique_ids(py, &requests)?;
    }
    let config = config.core();
    let by_content = config.prefix_caching && scheduler == Scheduler::Bucket;
    let workload: Vec<Arrival> = requests.iter().map(|request| request.get().arrival(by_content)).collect();
    let options = Options { record_steps, one_by_one: false };
    let progress = progress.map(|progress| progress.clone().unbind());
    let mut raised: Option<PyErr> = None;
    let mut observe = |now: Progress| {
        let called = Python::attach(|py| {
            py.check_signals()?;
            progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (now.done, now.total)).map(drop))
        });
        raised = called.err();
        if raised.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let core = Guarded::new(());
    let outcome =
        py.detach(|| core.with(|()| sim::replay(&workload, scheduler, config, &cost.inner, options, &mut observe)))?;
    match (outcome, raised) {
        (_, Some(error)) => Err(error),
        (Ok(Some(report)), None) => Ok(ReplayReport::new(requests, report)),
        (Ok(None), None) => unreachable!("only an exception stops a replay"),
        (Err(error), None) => Err(to_py(&error)),
    }
}

/// Read the workload; the text of an error is made for a wrong item only.
fn read_requests(requests: &Bound<'_, PyList>) -> PyResult<Vec<Py<TraceRequest>>> {
    let read = |(at, request): (usize, Bound<'_, PyAny>)| match request.cast::<TraceRequest>() {
        Ok(request) => Ok(request.clone().unbind()),
        Err(_) => instance(&format!("requests[{at}]"), &request).map(|request| request.clone().unbind()),
    };
    requests.iter().enumerate().map(read).collect()
}

/// Check that ids are unique: recorded steps identify requests by id.
fn check_unique_ids(py: Python<'_>, requests: &[Py<TraceRequest>]) -> PyResult<()> {
    let ids = PySet::empty(py)?;
    for (known, request) in requests.iter().enumerate() {
        let id = request.get().id(py);
        ids.add(id)?;
        if ids.len() == known {
            return Err(PyValueError::new_err(format!("id: {}: expected each id once", id.repr()?)));
        }
    }
    Ok(())
}
