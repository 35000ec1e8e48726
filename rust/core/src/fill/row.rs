//! The rows that tensors are filled from.

use crate::request::Sampling;

/// Padding of a block table: -1 when its bits are read as an `int32`.
pub const NO_BLOCK: u32 = u32::MAX;
/// Padding of a slot mapping: the KV entry of the token is not written.
pub const NO_SLOT: i64 = -1;

/// The part of one prompt that a prefill step computes.
#[derive(Clone, Copy, Debug)]
pub struct PrefillRow<'a> {
    /// Ids of the tokens to compute, at least one.
    pub tokens: &'a [u32],
    /// Position of the first of these tokens: the number of tokens computed before the step.
    pub start: u32,
    /// KV blocks of the request in order of position; they hold all positions up to the last token.
    pub blocks: &'a [u32],
    /// Sampling parameters.
    pub sampling: Sampling,
}

impl PrefillRow<'_> {
    /// Number of tokens of the request computed after the step.
    pub(super) fn end(&self) -> u64 {
        u64::from(self.start) + self.tokens.len() as u64
    }
}

/// One decoding request.
#[derive(Clone, Copy, Debug)]
pub struct DecodeRow<'a> {
    /// Id of the request's last token; the step computes its KV entry.
    pub token: u32,
    /// Position of that token.
    pub position: u32,
    /// KV blocks of the request in order of position; they hold that position.
    pub blocks: &'a [u32],
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Number of draft tokens after it, which the context bucket must hold too.
    pub drafts: u32,
}

impl DecodeRow<'_> {
    /// Number of tokens that the context bucket must hold.
    pub(super) fn context(&self) -> u64 {
        u64::from(self.position) + 1 + u64::from(self.drafts)
    }
}
