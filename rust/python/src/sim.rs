//! `TraceRequest`, `Cost` and `replay`: a workload in, a report out.

mod cost;
mod number;
pub(crate) mod replay;
mod report;
mod request;

pub(crate) use cost::Cost;
pub(crate) use report::ReplayReport;
pub(crate) use request::TraceRequest;
