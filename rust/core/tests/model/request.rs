//! A request of the reference model.

use neuron_sched_core::exclusive::Finish;
use neuron_sched_core::request::{Prompt, SEGMENT_TOKENS};

use super::pool::Content;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Waiting,
    Running,
    Finished(Finish),
    Cancelled,
    /// A completed step has reported the end.
    Reported,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) prompt: Prompt,
    pub(crate) stop: Vec<u32>,
    pub(super) priority: i64,
    pub(super) outputs_max: u32,
    pub(crate) status: Status,
    /// Prefix-cache hit, in tokens.
    pub(super) hit: u32,
    pub(crate) computed: u32,
    pub(crate) outputs: Vec<Option<u32>>,
    pub(crate) blocks: Vec<u32>,
    /// Prefill steps completed since the last decode opportunity.
    pub(super) prefill_streak: u32,
}

impl Request {
    pub(crate) fn length(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap()
    }

    /// Whether the caller must give the ids of the output tokens.
    pub(crate) fn needs_tokens(&self) -> bool {
        matches!(self.prompt, Prompt::Tokens(_))
    }

    /// Return the contents of the first `tokens` tokens, or `None` if one is unknown.
    pub(super) fn content(&self, tokens: u32) -> Option<Content> {
        (0..tokens)
            .map(|at| match (&self.prompt, at.checked_sub(self.length())) {
                (Prompt::Length(_), None) => None,
                (Prompt::Tokens(ids), None) => Some((None, ids[at as usize])),
                (Prompt::Segments { ids, .. }, None) => {
                    Some((Some(ids[(at / SEGMENT_TOKENS) as usize]), at % SEGMENT_TOKENS))
                }
                (_, Some(output)) => self.outputs[output as usize].map(|id| (None, id)),
            })
            .collect()
    }
}
