//! The token-budget scheduler, for hardware that may mix prefill and decode in one batch.
//!
//! A step spends at most `token_budget` tokens: one for everybody who decodes, then the rest of prompts in
//! progress, then waiting requests in order of arrival, each oldest first. A request is admitted with room
//! for its whole prompt and all its outputs in the KV cache, so nobody is ever evicted.
//!
//! Steps that repeat are not worked out again: while everybody who runs decodes, and nobody ends or can be
//! admitted, the plan stays as it is and completing it only counts.

mod invariants;
mod request;
mod scheduler;
mod step;

pub use request::{COUNT_MAX, NewMixed, Progress};
pub use scheduler::MixedScheduler;
pub use step::{Emitted, Planned, Wait};
