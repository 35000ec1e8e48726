//! The KV cache: the block pool, the prefix index from content to blocks, and the cache that combines the two.

mod block_pool;
mod cache;
mod prefix;

pub(crate) use cache::KvCache;
pub(crate) use prefix::Content;
