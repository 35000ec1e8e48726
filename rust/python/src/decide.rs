//! The decision objects for vLLM's own scheduler, and the explanation of a wait.

mod explanation;
mod gate;

pub(crate) use explanation::Explanation;
pub(crate) use gate::Gate;
