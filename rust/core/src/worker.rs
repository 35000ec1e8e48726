//! The requests of a worker: the tokens, KV blocks and sampling parameters that a step's tensors are filled from.
//!
//! An engine's scheduler sends a request in full once, and afterwards only what has changed. The worker keeps the rest
//! and appends the sampled tokens, so that each row of a step is complete when it is filled ([`crate::fill`]).
//!
//! A step is checked as a whole before any state changes: [`Worker::plan`] checks it, and [`Worker::commit`], which
//! cannot fail, applies it. The scheduler's counts and positions are authoritative: outputs that the scheduler has
//! discarded are dropped. Several steps may be in flight, so the token that a step computes may be unknown when the
//! step is filled. The output of a step for a request that has finished or was reset since is ignored.

mod check;
mod plan;
mod request;
mod scheduled;
mod state;

pub use plan::Plan;
pub use scheduled::{RequestUpdate, ScheduledRow, ScheduledStep};
pub use state::Worker;
