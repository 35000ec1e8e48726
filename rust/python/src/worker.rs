//! `Worker`: the requests of a vLLM worker, and the steps that vLLM's scheduler sends to it.

mod scheduler_output;
mod state;

pub(crate) use state::Worker;
