//! `replay` and its values: `TraceRequest`, `Cost` and `ReplayReport`.

mod cost;
mod number;
pub(crate) mod replay;
mod report;
mod request;

pub(crate) use cost::Cost;
pub(crate) use report::ReplayReport;
pub(crate) use request::TraceRequest;
