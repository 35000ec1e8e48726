//! `Worker`: what a vLLM worker knows of its requests, and the steps that vLLM's scheduler sends it.

mod message;
mod state;

pub(crate) use state::Worker;
