//! `BucketScheduler` and its values: request ids for the rows of the core's exclusive scheduler.

mod methods;
mod names;
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
