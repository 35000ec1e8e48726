//! `Gate`: decisions for a vLLM scheduler, and `Explanation`: why the head of the queue waits.

mod explanation;
mod gate;

pub(crate) use explanation::Explanation;
pub(crate) use gate::Gate;
