//! What the scheduler keeps of a request, and what it tells of one.

use super::completion::Finish;
use crate::decide::WorstCase;
use crate::kv::Content;
use crate::queue::Ticket;
use crate::request::{Prompt, Sampling, UNKNOWN_TOKEN};

/// A request to add.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Its prompt.
    pub prompt: Prompt,
    /// Most tokens that it may emit; capped at `max(1, max_model_len - prompt)`.
    pub max_tokens: u32,
    /// Under the priority policy the lower number goes first.
    pub priority: i64,
    /// Tokens that end it.
    pub stop_token_ids: Box<[u32]>,
    /// For the tensors.
    pub sampling: Sampling,
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Waiting(Ticket),
    Running,
    /// Finished, or cancelled where there is no reason.
    Ended(Option<Finish>),
}

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) prompt: Prompt,
    pub(super) priority: i64,
    pub(super) stop_token_ids: Box<[u32]>,
    pub(super) sampling: Sampling,
    /// Outputs, capped.
    pub(super) outputs_max: u32,
    /// Blocks reserved while it runs.
    pub(super) need: u32,
    pub(super) place: Place,
    /// Where its [`Started`] is, once it was started.
    pub(super) seat: Option<u32>,
}

/// What only a request that was started has. Its seat is used again, and with it the memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Started {
    pub(super) blocks: Vec<u32>,
    pub(super) outputs: Vec<u32>,
    /// Tokens of the prompt.
    pub(super) prompt: u32,
    pub(super) sampling: Sampling,
    /// Leading blocks whose content is offered to others, and the content of the last of them.
    pub(super) offered: u32,
    pub(super) content: Content,
    /// Tokens computed when it ended.
    pub(super) computed: u32,
    /// While it decodes: the clock at which it needs its next block.
    pub(super) need_at: u64,
    /// While it decodes: the clock at which it ends.
    pub(super) end_at: u64,
}

impl Started {
    /// KV slots of its blocks.
    pub(super) fn slots(&self, block_size: u32) -> u32 {
        u32::try_from(self.blocks.len()).expect("blocks are counted in 32 bits") * block_size
    }

    /// The output at position `at` of the sequence, if it was told.
    pub(super) fn output(&self, at: u32) -> Option<u32> {
        let output = at.checked_sub(self.prompt)? as usize;
        self.outputs.get(output).copied().filter(|&token| token != UNKNOWN_TOKEN)
    }

    /// Whether it may come to need more blocks: those that it has do not hold the longest sequence.
    pub(super) fn may_grow(&self, worst_case: WorstCase) -> bool {
        self.slots(worst_case.block_size) < worst_case.max_model_len
    }
}
