//! The KV cache: a block pool, and the index that lets requests share what it holds.

use super::block_pool::BlockPool;
use super::prefix::{Content, PrefixIndex};
use crate::request::Sequence;

/// Blocks and their contents.
#[derive(Clone, Debug)]
pub(crate) struct KvCache {
    pool: BlockPool,
    /// Absent where nothing is shared.
    index: Option<PrefixIndex>,
    block_size: u32,
    /// Tokens of the block that is looked at.
    tokens: Vec<u64>,
}

impl KvCache {
    /// A cache of `total` free blocks of `block_size` tokens.
    pub(crate) fn new(total: u32, block_size: u32, prefix_caching: bool) -> Self {
        Self {
            pool: BlockPool::new(total),
            index: prefix_caching.then(PrefixIndex::default),
            block_size,
            tokens: Vec::new(),
        }
    }

    /// Appends the next `count` blocks to `blocks`; what one still held is forgotten. There must be as many.
    pub(crate) fn allocate(&mut self, count: u32, blocks: &mut Vec<u32>) {
        let Self { pool, index, .. } = self;
        let evict = |block| index.as_mut().expect("a block is cached in the index").evict(block);
        pool.take(count, blocks, evict);
    }

    /// Gives up a request's blocks, or its share of them.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        self.pool.release(blocks);
    }

    /// References the blocks that hold the longest known prefix of `sequence`, whole blocks of at most
    /// `limit` tokens, and appends them to `blocks`. Returns the content of the last one.
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

    /// Offers the block at `position` of a request, full and computed, behind the content of the block
    /// before it. `None` when its tokens are not known; no later block can be offered then.
    pub(crate) fn offer(
        &mut self,
        sequence: &Sequence<'_>,
        position: u32,
        parent: Content,
        block: u32,
    ) -> Option<Content> {
        let index = self.index.as_mut()?;
        if !sequence.read(position * self.block_size, self.block_size, &mut self.tokens) {
            return None;
        }
        self.pool.cache(block);
        Some(index.register(parent, &self.tokens, block))
    }

    /// Whether contents are shared at all.
    pub(crate) fn shares(&self) -> bool {
        self.index.is_some()
    }

    /// The blocks.
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }
}
