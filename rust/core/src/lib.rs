//! Decision core of neuron-sched: which requests run in the next step, how many tokens each gets, and
//! what compiled shape the step is padded to.
//!
//! The core knows requests by a compact [`request::Row`]; names, clocks and tensors belong to its
//! callers. It reads no clock, no environment and no randomly seeded map: equal calls give equal answers.
//! "Does not fit now" is an answer ([`ledger::Wait`]), a caller's mistake is an [`error::Error`], and a
//! panic is always a fault of the core itself.
#![forbid(unsafe_code)]

pub mod block_pool;
pub mod bucket;
pub mod chunk;
pub mod config;
pub mod cost;
pub mod decimal;
pub mod error;
pub mod exclusive;
pub mod fill;
pub mod fixed_map;
pub mod gate;
pub mod kv_cache;
pub mod ledger;
pub mod mixed;
pub mod phase;
pub mod prefix;
pub mod queue;
pub mod request;
pub mod sim;
pub mod step;
pub mod worker;
