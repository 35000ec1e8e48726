//! Decisions: may the head of the queue start, does the step prefill or decode, how many tokens, is the step sound?
//!
//! A decision object owns no queue and no KV blocks. [`crate::exclusive`] composes the objects over its own queue and
//! cache; [`Gate`] composes the same objects for an engine that has a queue and a cache of its own (vLLM).

mod chunk;
mod gate;
mod ledger;
mod phase;
mod step;

pub use chunk::{Chunker, Pack};
pub use gate::{Gate, Group, Head, Progress, Rules};
pub use ledger::{Candidate, Ledger, Wait, WorstCase};
pub use phase::{Decision, Kind, Phase, PhaseInputs};
pub(crate) use step::Chunk;
pub use step::{Step, check_step};
