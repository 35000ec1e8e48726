//! A request in the three stages of its life: added, started, running.

use super::completion::Finish;
use crate::decide::WorstCase;
use crate::kv::Content;
use crate::queue::Ticket;
use crate::request::{Prompt, Row, Sampling, UNKNOWN_TOKEN};

/// A request to add.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// The prompt.
    pub prompt: Prompt,
    /// Most output tokens of the request; capped at `max(1, max_model_len - prompt)`.
    pub max_tokens: u32,
    /// Under the priority policy, requests with lower numbers are admitted first.
    pub priority: i64,
    /// Token ids that end the request when it emits one of them.
    pub stop_token_ids: Box<[u32]>,
    /// Sampling parameters, passed on to the tensors.
    pub sampling: Sampling,
}

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestState {
    Waiting(Ticket),
    Running,
    /// Finished for a reason, or cancelled if there is none.
    Ended(Option<Finish>),
}

/// A request from `add` until its end was reported.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) prompt: Prompt,
    pub(super) priority: i64,
    pub(super) stop_token_ids: Box<[u32]>,
    pub(super) sampling: Sampling,
    /// Most output tokens, capped by `max_model_len`.
    pub(super) outputs_max: u32,
    /// KV blocks reserved while the request is running.
    pub(super) needed_blocks: u32,
    pub(super) state: RequestState,
    /// Batch slot, which is the index of its [`Started`], once the request was started.
    pub(super) slot: Option<u32>,
}

/// The part of a request that exists only once it was started. The next request in the same batch slot reuses the
/// memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Started {
    pub(super) blocks: Vec<u32>,
    pub(super) outputs: Vec<u32>,
    /// Length of the prompt, in tokens.
    pub(super) prompt_len: u32,
    pub(super) sampling: Sampling,
    /// Number of leading blocks that are in the prefix index; `u32::MAX` if no more can be added.
    pub(super) indexed: u32,
    /// Content of the last block that is in the prefix index.
    pub(super) content: Content,
    /// Tokens computed when the request ended.
    pub(super) computed: u32,
    /// Clock at which a decoding request needs its next block.
    pub(super) next_block_at: u64,
    /// Clock at which a decoding request ends.
    pub(super) end_at: u64,
}

impl Started {
    /// Number of tokens that the allocated blocks can hold.
    pub(super) fn kv_slots(&self, block_size: u32) -> u32 {
        u32::try_from(self.blocks.len()).expect("blocks are counted in 32 bits") * block_size
    }

    /// Return the output token at `position` of the sequence, if its id is known.
    pub(super) fn output(&self, position: u32) -> Option<u32> {
        let output = position.checked_sub(self.prompt_len)? as usize;
        self.outputs.get(output).copied().filter(|&token| token != UNKNOWN_TOKEN)
    }

    /// Whether a sequence of `max_model_len` tokens would need more blocks than are allocated.
    pub(super) fn may_grow(&self, worst_case: WorstCase) -> bool {
        self.kv_slots(worst_case.block_size) < worst_case.max_model_len
    }
}

/// A running request, with counts in tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningRequest {
    pub(super) row: Row,
    /// Batch slot, which is the index of its [`Started`].
    pub(super) slot: u32,
    pub(super) prompt_len: u32,
    /// Computed tokens at which the request finishes by length. The last output is never computed.
    pub(super) end: u32,
    /// Prefix-cache hit: tokens in shared blocks when the request was admitted.
    pub(super) hit: u32,
    /// Tokens computed by completed steps.
    pub(super) computed: u32,
    /// Tokens of planned steps.
    pub(super) planned: u32,
    /// Whether the prompt is computed.
    pub(super) decoding: bool,
    /// Whether the caller must give the ids of the output tokens, because the prompt was given as token ids.
    pub(super) needs_tokens: bool,
}

impl RunningRequest {
    /// Tokens computed once the planned steps have run.
    pub(super) fn projected(&self) -> u32 {
        self.computed + self.planned
    }

    /// Whether prompt tokens are left once the planned steps have run.
    pub(super) fn prefilling(&self) -> bool {
        self.projected() < self.prompt_len
    }

    /// Whether the request can decode once the planned steps have run.
    pub(super) fn ready(&self) -> bool {
        (self.prompt_len..self.end).contains(&self.projected())
    }

    /// Prompt tokens to compute. Until the first chunk has run this is the whole prompt, so that packing and the first
    /// chunk do not depend on the prefix-cache hit.
    pub(super) fn rest(&self) -> u32 {
        if self.projected() == self.hit { self.prompt_len } else { self.prompt_len - self.projected() }
    }

    /// Output tokens generated after `computed` tokens.
    pub(super) fn generated(computed: u32, prompt_len: u32) -> u32 {
        (computed + 1).saturating_sub(prompt_len)
    }

    /// Length of a prompt that `add` accepted.
    pub(super) fn length(prompt: &Prompt) -> u32 {
        u32::try_from(prompt.len()).expect("at most max_model_len")
    }
}
