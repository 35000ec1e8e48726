//! Rows as tensors are filled from them.

use crate::request::Sampling;

/// Stands in a block table where there is no block: -1 to whoever reads its bits as an `int32`.
pub const NO_BLOCK: u32 = u32::MAX;
/// Stands in a slot mapping where nothing is to be written.
pub const NO_SLOT: i64 = -1;

/// The part of one prompt that a prefill step computes.
#[derive(Clone, Copy, Debug)]
pub struct PrefillRow<'a> {
    /// Ids of the tokens to compute, at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them: tokens that were computed before.
    pub start: u32,
    /// KV blocks of the request in order of position; they hold all positions up to the last token.
    pub blocks: &'a [u32],
    /// For the sampler.
    pub sampling: Sampling,
}

impl PrefillRow<'_> {
    /// Tokens computed once the step has run.
    pub(super) fn end(&self) -> u64 {
        u64::from(self.start) + self.tokens.len() as u64
    }
}

/// One request that decodes.
#[derive(Clone, Copy, Debug)]
pub struct DecodeRow<'a> {
    /// Id of its last token, which the step computes.
    pub token: u32,
    /// Position of that token.
    pub position: u32,
    /// KV blocks of the request in order of position; they hold that position.
    pub blocks: &'a [u32],
    /// For the sampler.
    pub sampling: Sampling,
    /// Draft tokens behind it: the context must hold them too.
    pub drafts: u32,
}

impl DecodeRow<'_> {
    /// Tokens that the context must hold.
    pub(super) fn context(&self) -> u64 {
        u64::from(self.position) + 1 + u64::from(self.drafts)
    }
}
