//! The exclusive scheduler: each step is all prefill or all decode, padded to a compiled size.
//!
//! It composes the decision objects ([`Ledger`], [`Phase`], [`Chunker`], [`Buckets`]) over a queue and a
//! KV cache of its own. Planning admits and allocates at once; counts move when a step is completed, so a
//! step that was not completed may be planned again. One step may be planned ahead of a pending one, on
//! the counts that the pending one will leave behind.
//!
//! Cost: a decode step moves one clock for all that decode, and looks at those that end or need a block; it
//! never looks at who waits. What a request needs only when it starts or ends stays out of its columns.

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
