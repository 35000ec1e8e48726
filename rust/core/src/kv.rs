//! The KV cache: which blocks are free, which block holds which content, and the two together.

mod block_pool;
mod cache;
mod prefix;

pub(crate) use cache::KvCache;
pub(crate) use prefix::Content;
