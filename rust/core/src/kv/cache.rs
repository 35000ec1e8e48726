//! The KV cache: the block pool, and the prefix index by which requests share blocks.

use super::block_pool::BlockPool;
use super::prefix::{Content, PrefixIndex};
use crate::request::Sequence;

/// The KV blocks, and the contents of the cached ones.
#[derive(Clone, Debug)]
pub(crate) struct KvCache {
    pool: BlockPool,
    /// `None` if prefix caching is off.
    index: Option<PrefixIndex>,
    block_size: u32,
    /// Buffer for the tokens of one block.
    tokens: Vec<u64>,
}

impl KvCache {
    /// Return a cache of `total` free blocks of `block_size` tokens each.
    pub(crate) fn new(total: u32, block_size: u32, prefix_caching: bool) -> Self {
        Self {
            pool: BlockPool::new(total),
            index: prefix_caching.then(PrefixIndex::default),
            block_size,
            tokens: Vec::new(),
        }
    }

    /// Append the next `count` free blocks to `blocks`, and evict the contents of those that were cached. At least
    /// `count` blocks must be free.
    pub(crate) fn allocate(&mut self, count: u32, blocks: &mut Vec<u32>) {
        let Self { pool, index, .. } = self;
        let evict = |block| index.as_mut().expect("only the index caches blocks").evict(block);
        pool.allocate(count, blocks, evict);
    }

    /// Release the blocks of a request. Blocks that other requests share stay owned.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        self.pool.release(blocks);
    }

    /// Add a reference to each cached block of the longest prefix of `sequence`, in full blocks and at most `limit`
    /// tokens, and append the blocks to `blocks`. Returns the content of the last one.
    pub(crate) fn share(&mut self, sequence: &Sequence<'_>, limit: u32, blocks: &mut Vec<u32>) -> Content {
        let mut content = Content::ROOT;
        let Some(index) = &self.index else { return content };
        for at in 0..limit / self.block_size {
            if !sequence.read(at * self.block_size, self.block_size, &mut self.tokens) {
                break;
            }
            let Some(found) = index.find(content, &self.tokens) else { break };
            let Some(block) = index.block(found) else { break };
            self.pool.share(block);
            blocks.push(block);
            content = found;
        }
        content
    }

    /// Add a full, computed block to the prefix index. The block is the `nth` of its request, counted from 0, and
    /// `parent` is the content of the block before it.
    ///
    /// Returns the content of the block, or `None` if the ids of its tokens are not known. Then no later block of the
    /// request can be found either.
    pub(crate) fn index_block(
        &mut self,
        sequence: &Sequence<'_>,
        nth: u32,
        parent: Content,
        block: u32,
    ) -> Option<Content> {
        let index = self.index.as_mut()?;
        if !sequence.read(nth * self.block_size, self.block_size, &mut self.tokens) {
            return None;
        }
        self.pool.cache(block);
        Some(index.register(parent, &self.tokens, block))
    }

    /// Whether prefix caching is on.
    pub(crate) fn has_prefix_caching(&self) -> bool {
        self.index.is_some()
    }

    /// The block pool.
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }
}
