//! The pool of KV blocks: owned blocks, free blocks, and the order in which free blocks are allocated.
//!
//! Block ids are `1..=total`. Block 0 is never allocated: it is vLLM's null block. The order is vLLM's: a freed block
//! that is cached goes to the back of the free queue (the least recently freed is allocated first), any other to the
//! front (the most recently freed is allocated first).

/// Most blocks for which a new pool allocates table entries at once. The tables grow beyond it.
const PREALLOCATED_MAX: u32 = 1 << 20;

/// A pool of reference-counted blocks.
#[derive(Clone, Debug)]
pub(crate) struct BlockPool {
    total: u32,
    /// Blocks `1..=used` were allocated at least once. The tables below grow with it.
    used: u32,
    /// Front of the free queue, as a stack: the last entry is allocated next.
    front: Vec<u32>,
    /// Back of the free queue, after the blocks that were never used: a ring through entry 0.
    back: Vec<Link>,
    back_len: u32,
    /// References by block.
    refs: Vec<u32>,
    /// Whether the prefix index has the content of a block.
    cached: Vec<bool>,
    /// Number of cached blocks, both free and owned.
    num_cached: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Link {
    next: u32,
    previous: u32,
}

impl BlockPool {
    /// Return a pool of `total` free blocks.
    pub(crate) fn new(total: u32) -> Self {
        let mut pool = Self {
            total,
            used: 0,
            front: Vec::new(),
            back: Vec::new(),
            back_len: 0,
            refs: Vec::new(),
            cached: Vec::new(),
            num_cached: 0,
        };
        let capacity = total.min(PREALLOCATED_MAX) as usize + 1;
        pool.front.reserve(capacity);
        pool.back.reserve(capacity);
        pool.refs.reserve(capacity);
        pool.cached.reserve(capacity);
        pool.back.push(Link::default());
        pool.refs.push(0);
        pool.cached.push(false);
        pool
    }

    /// Append the next `count` free blocks to `blocks`, with one reference each. At least `count` blocks must be free.
    /// Calls `evict` with each block that was cached.
    pub(crate) fn allocate(&mut self, count: u32, blocks: &mut Vec<u32>, evict: impl FnMut(u32)) {
        let uncached = self.front.len().min(count as usize);
        let kept = self.front.len() - uncached;
        blocks.extend(self.front[kept..].iter().rev());
        for &block in &self.front[kept..] {
            self.refs[block as usize] = 1;
        }
        self.front.truncate(kept);
        if uncached < count as usize {
            let uncached = u32::try_from(uncached).expect("below the count");
            self.allocate_after_front(count - uncached, blocks, evict);
        }
    }

    /// Allocate blocks that were never used, then cached ones.
    fn allocate_after_front(&mut self, count: u32, blocks: &mut Vec<u32>, mut evict: impl FnMut(u32)) {
        let new = count.min(self.total - self.used);
        blocks.extend(self.used + 1..=self.used + new);
        self.used += new;
        let used = self.used as usize + 1;
        self.back.resize(used, Link::default());
        self.refs.resize(used, 1);
        self.cached.resize(used, false);
        for _ in new..count {
            assert!(self.back_len > 0, "no more blocks are allocated than are free");
            let block = self.back[0].next;
            self.unlink(block);
            self.refs[block as usize] = 1;
            self.cached[block as usize] = false;
            self.num_cached -= 1;
            evict(block);
            blocks.push(block);
        }
    }

    /// Add a reference to a cached block, which may be free.
    pub(crate) fn share(&mut self, block: u32) {
        let at = block as usize;
        assert!(self.cached[at], "only a cached block is shared");
        if self.refs[at] == 0 {
            self.unlink(block);
        }
        self.refs[at] += 1;
    }

    /// Mark an owned block as cached.
    pub(crate) fn cache(&mut self, block: u32) {
        assert!(self.refs[block as usize] > 0, "only an owned block is cached");
        self.num_cached += u32::from(!std::mem::replace(&mut self.cached[block as usize], true));
    }

    /// Drop one reference to each block of a request. Blocks without references become free, the last one first.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        for &block in blocks {
            let refs = &mut self.refs[block as usize];
            assert!(*refs > 0, "only an owned block is released");
            *refs -= 1;
        }
        // Pushed in order, so that the last block is on top of the stack.
        if self.num_cached == 0 {
            // Only cached blocks are shared, so all blocks of the request are free now.
            self.front.extend_from_slice(blocks);
            return;
        }
        let Self { refs, cached, .. } = self;
        let free = |block: u32| refs[block as usize] == 0;
        self.front.extend(blocks.iter().filter(|&&block| free(block) && !cached[block as usize]));
        for &block in blocks.iter().rev() {
            if self.refs[block as usize] == 0 && self.cached[block as usize] {
                self.link_last(block);
            }
        }
    }

    /// Number of references to `block`.
    pub(crate) fn refs(&self, block: u32) -> u32 {
        self.refs.get(block as usize).copied().unwrap_or(0)
    }

    /// Number of blocks without references, cached blocks included.
    pub(crate) fn num_free(&self) -> u32 {
        self.total - self.used + self.front_len() + self.back_len
    }

    /// Number of blocks in the pool.
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    /// Return the free blocks that were used before, in the order in which they would be allocated.
    pub(crate) fn returned(&self) -> impl Iterator<Item = u32> + '_ {
        self.front.iter().rev().copied().chain(self.returned_cached())
    }

    /// Return the free cached blocks, least recently freed first.
    fn returned_cached(&self) -> impl Iterator<Item = u32> + '_ {
        let back = std::iter::successors(Some(self.back[0].next), |&block| Some(self.back[block as usize].next));
        back.take(self.back_len as usize)
    }

    fn front_len(&self) -> u32 {
        u32::try_from(self.front.len()).expect("no more than all blocks")
    }

    fn link_last(&mut self, block: u32) {
        let last = self.back[0].previous;
        self.back[block as usize] = Link { next: 0, previous: last };
        self.back[last as usize].next = block;
        self.back[0].previous = block;
        self.back_len += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Link { next, previous } = self.back[block as usize];
        self.back[previous as usize].next = next;
        self.back[next as usize].previous = previous;
        self.back_len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Return all free blocks, in the order in which they would be allocated.
    fn free_queue(pool: &BlockPool) -> Vec<u32> {
        let never_used = pool.used + 1..=pool.total;
        pool.front.iter().rev().copied().chain(never_used).chain(pool.returned_cached()).collect()
    }

    fn allocate(pool: &mut BlockPool, count: u32) -> Vec<u32> {
        let mut blocks = Vec::new();
        pool.allocate(count, &mut blocks, |block| panic!("{block} is cached"));
        blocks
    }

    #[test]
    fn new_blocks_are_allocated_in_ascending_order_from_1() {
        let mut pool = BlockPool::new(3);
        assert_eq!(allocate(&mut pool, 3), [1, 2, 3]);
        assert_eq!(pool.num_free(), 0);
    }

    #[test]
    fn uncached_blocks_are_freed_to_the_front_and_cached_ones_to_the_back() {
        let mut pool = BlockPool::new(6);
        let blocks = allocate(&mut pool, 4);
        pool.cache(1);
        pool.cache(2);
        pool.release(&blocks);
        assert_eq!(free_queue(&pool), [4, 3, 5, 6, 2, 1]);
        pool.share(2);
        assert_eq!((free_queue(&pool), pool.refs(2), pool.num_free()), (vec![4, 3, 5, 6, 1], 1, 5));
        assert_eq!(allocate(&mut pool, 4), [4, 3, 5, 6]);
        let (mut blocks, mut evicted) = (Vec::new(), Vec::new());
        pool.allocate(1, &mut blocks, |block| evicted.push(block));
        assert_eq!((blocks, evicted, pool.num_free()), (vec![1], vec![1], 0));
        assert_eq!(pool.cached[1..3], [false, true]);
    }

    #[test]
    #[should_panic(expected = "no more blocks are allocated than are free")]
    fn allocating_more_blocks_than_are_free_panics() {
        allocate(&mut BlockPool::new(2), 3);
    }

    #[test]
    fn a_shared_block_is_free_after_its_last_release() {
        let mut pool = BlockPool::new(2);
        let blocks = allocate(&mut pool, 1);
        pool.cache(1);
        pool.share(1);
        pool.release(&blocks);
        assert_eq!((pool.refs(1), pool.num_free()), (1, 1));
        pool.release(&blocks);
        assert_eq!((pool.refs(1), pool.num_free()), (0, 2));
    }
}
