//! Python binding of `neuron-sched-core`: convert the arguments, call one core function, convert the result. All
//! scheduling decisions are in the core.

mod config;
mod convert;
mod decide;
mod error;
mod exclusive;
mod fill;
mod guard;
mod mixed;
mod sim;
mod worker;

use pyo3::prelude::*;

/// Native part of `neuron_sched`. Use the names that the package exports.
#[pymodule(gil_used = false)]
mod _native {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use super::build_info;
    #[pymodule_export]
    use super::config::{Buckets, ConfigField, NeuronConfig};
    #[pymodule_export]
    use super::decide::{Explanation, Gate};
    #[pymodule_export]
    use super::exclusive::{BucketScheduler, Outcome, Outcomes, Request, RequestState, Step};
    #[pymodule_export]
    use super::fill::{Batch, PaddedInputs};
    #[pymodule_export]
    use super::mixed::{Req, Requests, Scheduler};
    #[pymodule_export]
    use super::sim::{Cost, ReplayReport, TraceRequest, replay::replay};
    #[pymodule_export]
    use super::worker::Worker;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

/// Return what the extension was built from.
#[pyfunction]
fn build_info() -> std::collections::BTreeMap<&'static str, Option<&'static str>> {
    let profile = if cfg!(debug_assertions) { "debug" } else { env!("BUILD_PROFILE") };
    let commit = Some(env!("BUILD_COMMIT")).filter(|commit| !commit.is_empty());
    [("profile", Some(profile)), ("commit", commit), ("target", Some(env!("BUILD_TARGET")))].into()
}
