//! The exclusive scheduler: each step is all prefill or all decode, padded to a compiled size.
//!
//! It composes the decision objects [`Ledger`], [`Phase`], [`Chunker`] and [`Buckets`] over its own queue and KV cache.
//! Planning admits requests and allocates blocks at once. The counts of a request change only when a step is completed,
//! so a step that was not completed can be planned again. One step can be planned ahead of the step in flight, from the
//! counts that the step in flight will leave.
//!
//! A decode step moves one clock for all decoding requests and visits only those that end or need a block. It never
//! visits the waiting requests.
//!
//! [`Ledger`]: crate::decide::Ledger
//! [`Phase`]: crate::decide::Phase
//! [`Chunker`]: crate::decide::Chunker
//! [`Buckets`]: crate::config::Buckets

mod blocks_due;
mod complete;
mod completion;
mod explain;
mod invariants;
mod plan;
mod request;
mod rows;
mod running;
mod scheduler;
mod view;

pub use completion::{Completion, Finish, Outcome, Tokens};
pub use explain::Explanation;
pub use plan::Options;
pub use request::NewRequest;
pub use rows::Unfilled;
pub use scheduler::ExclusiveScheduler;
pub use view::{RequestView, Status};
