//! A request as the model keeps it.

use neuron_sched_core::exclusive::Finish;
use neuron_sched_core::request::{Prompt, SEGMENT_TOKENS};

use super::pool::Content;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Waiting,
    Running,
    Finished(Finish),
    Cancelled,
    /// Its end was carried by a completed step.
    Delivered,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) prompt: Prompt,
    pub(crate) stop: Vec<u32>,
    pub(super) priority: i64,
    pub(super) outputs_max: u32,
    pub(crate) status: Status,
    pub(super) hit: u32,
    pub(crate) computed: u32,
    pub(crate) outputs: Vec<Option<u32>>,
    pub(crate) blocks: Vec<u32>,
    /// Prefill steps completed since it last had a chance to decode.
    pub(super) starved: u32,
}

impl Request {
    pub(crate) fn length(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap()
    }

    /// Whether its output tokens must be told.
    pub(crate) fn told(&self) -> bool {
        matches!(self.prompt, Prompt::Tokens(_))
    }

    /// What its first `tokens` tokens are; `None` where one is not known.
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
