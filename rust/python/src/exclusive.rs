//! `BucketScheduler` and its values: the core's exclusive scheduler, with request ids for its rows.

mod batch_ids;
mod methods;
mod outcome;
mod outcomes;
mod request;
mod scheduler;
mod step;

pub(crate) use outcome::Outcome;
pub(crate) use outcomes::Outcomes;
pub(crate) use request::{Request, RequestState};
pub(crate) use scheduler::BucketScheduler;
pub(crate) use step::Step;
