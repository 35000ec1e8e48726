//! The decisions: is the head of the queue admitted, does the step prefill or decode, how many tokens does it take, and
//! can a compiled graph run it?
//!
//! A decision object owns no queue and no KV blocks. [`crate::exclusive`] composes the objects over its own queue and KV
//! cache. [`Gate`] composes the same objects for an engine that has its own queue and KV cache (vLLM).

mod chunk;
mod gate;
mod kv_group;
mod ledger;
mod phase;
mod progress;
mod step;

pub use chunk::{Chunker, Pack};
pub use gate::{Gate, Head, Rules};
pub use kv_group::KvGroup;
pub use ledger::{Candidate, Ledger, Wait, WorstCase};
pub use phase::{Decision, Kind, Phase, PhaseInputs};
pub use progress::Progress;
pub(crate) use step::Chunk;
pub use step::{Step, check_step};
