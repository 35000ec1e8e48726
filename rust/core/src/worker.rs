//! What a worker knows of the requests that an engine's scheduler lets it run: tokens, KV blocks, sampling.
//!
//! Such a scheduler tells a request once, and from then on only what is new. The worker keeps the rest, adds the
//! tokens that were sampled, and so has every row of a step as the tensors want it ([`crate::fill`]).
//!
//! A step is checked whole before anything is changed: [`Worker::plan`] answers what it would be, and
//! [`Worker::commit`], which cannot fail, does it. Counts and positions are the scheduler's: what it takes back,
//! the worker forgets. Several steps may be in flight, so a token may be unknown when the step that computes it
//! is filled; and a request that ended, or was set back, has no more to do with the steps that were filled before.

mod check;
mod message;
mod plan;
mod request;
mod state;

pub use message::{Told, ToldRow, Who};
pub use plan::Plan;
pub use state::Worker;
