//! `Scheduler`, the token-budget scheduler: Python requests for the rows of the core's mixed scheduler.

mod methods;
mod req;
mod requests;
mod roster;
mod scheduler;

pub(crate) use req::Req;
pub(crate) use requests::Requests;
pub(crate) use scheduler::Scheduler;
