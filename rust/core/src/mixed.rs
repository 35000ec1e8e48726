//! The token-budget scheduler, for hardware that may mix prefill and decode in one batch.
//!
//! A step has at most `token_budget` tokens: one for each decoding request, then the rest of the prompts in progress, then
//! prompts of waiting requests, each oldest first. A request is admitted if the KV cache can hold its whole prompt and all
//! its outputs beside the reservations, so no request is ever preempted.
//!
//! Identical steps are not planned again: while every running request decodes, none finishes and none can be admitted,
//! the plan stays and completing it only changes counts.

mod complete;
mod invariants;
mod plan;
mod request;
mod scheduler;
mod step;

pub use request::{COUNT_MAX, NewMixed, Progress};
pub use scheduler::MixedScheduler;
pub use step::{Emitted, Planned, Wait};
