//! `Scheduler` and its values: the core's token-budget scheduler, with Python requests for its rows.

mod methods;
mod req;
mod request_table;
mod requests;
mod scheduler;

pub(crate) use req::Req;
pub(crate) use requests::Requests;
pub(crate) use scheduler::Scheduler;
