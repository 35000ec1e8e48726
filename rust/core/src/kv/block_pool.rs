//! KV blocks: which are owned, which are free, and in which order the free ones are handed out.
//!
//! Blocks are 1..=total; 0 is never handed out, so that a KV array laid out for vLLM fits. The order is
//! vLLM's: a block whose content may be served again goes to the back of the free queue (the least
//! recently freed is taken first), any other to the front (the most recently freed is taken first).

/// Blocks for which a new pool makes room in its tables at once; they grow beyond it.
const ROOM_MAX: u32 = 1 << 20;

/// A pool of reference-counted blocks.
#[derive(Clone, Debug)]
pub(crate) struct BlockPool {
    total: u32,
    /// Blocks `1..=used` were handed out at least once; the tables below grow with it.
    used: u32,
    /// Front of the free queue; the top is next.
    front: Vec<u32>,
    /// Back of the free queue, behind the never used blocks: a ring through entry 0.
    back: Vec<Link>,
    back_len: u32,
    refs: Vec<u32>,
    cached: Vec<bool>,
    /// How many are cached, owned ones included.
    cached_len: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Link {
    next: u32,
    before: u32,
}

impl BlockPool {
    /// A pool of `total` free blocks.
    pub(crate) fn new(total: u32) -> Self {
        let mut pool = Self {
            total,
            used: 0,
            front: Vec::new(),
            back: Vec::new(),
            back_len: 0,
            refs: Vec::new(),
            cached: Vec::new(),
            cached_len: 0,
        };
        let room = total.min(ROOM_MAX) as usize + 1;
        pool.front.reserve(room);
        pool.back.reserve(room);
        pool.refs.reserve(room);
        pool.cached.reserve(room);
        pool.back.push(Link::default());
        pool.refs.push(0);
        pool.cached.push(false);
        pool
    }

    /// Appends the next `count` free blocks to `blocks`, with one reference each, and names those that were
    /// cached: their content is lost now. There must be as many.
    pub(crate) fn take(&mut self, count: u32, blocks: &mut Vec<u32>, evict: impl FnMut(u32)) {
        let plain = self.front.len().min(count as usize);
        let kept = self.front.len() - plain;
        blocks.extend(self.front[kept..].iter().rev());
        for &block in &self.front[kept..] {
            self.refs[block as usize] = 1;
        }
        self.front.truncate(kept);
        if plain < count as usize {
            let plain = u32::try_from(plain).expect("below the count");
            self.take_behind_front(count - plain, blocks, evict);
        }
    }

    /// Takes never used blocks, then cached ones.
    fn take_behind_front(&mut self, count: u32, blocks: &mut Vec<u32>, mut evict: impl FnMut(u32)) {
        let new = count.min(self.total - self.used);
        blocks.extend(self.used + 1..=self.used + new);
        self.used += new;
        let used = self.used as usize + 1;
        self.back.resize(used, Link::default());
        self.refs.resize(used, 1);
        self.cached.resize(used, false);
        for _ in new..count {
            assert!(self.back_len > 0, "no more blocks are taken than are free");
            let block = self.back[0].next;
            self.unlink(block);
            self.refs[block as usize] = 1;
            self.cached[block as usize] = false;
            self.cached_len -= 1;
            evict(block);
            blocks.push(block);
        }
    }

    /// Adds a reference to a cached block, which may be free.
    pub(crate) fn share(&mut self, block: u32) {
        let at = block as usize;
        assert!(self.cached[at], "only a cached block is shared");
        if self.refs[at] == 0 {
            self.unlink(block);
        }
        self.refs[at] += 1;
    }

    /// Marks an owned block as one whose content may be served again.
    pub(crate) fn cache(&mut self, block: u32) {
        assert!(self.refs[block as usize] > 0, "only an owned block is cached");
        self.cached_len += u32::from(!std::mem::replace(&mut self.cached[block as usize], true));
    }

    /// Drops one reference to each of a request's blocks, last block first.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        for &block in blocks {
            let refs = &mut self.refs[block as usize];
            assert!(*refs > 0, "only an owned block is released");
            *refs -= 1;
        }
        // In order of the request, so that its last block ends up on top.
        if self.cached_len == 0 {
            // Only a cached block is shared, so all of them are free now.
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

    /// References to `block`.
    pub(crate) fn refs(&self, block: u32) -> u32 {
        self.refs.get(block as usize).copied().unwrap_or(0)
    }

    /// Blocks that nobody references, cached ones included.
    pub(crate) fn free(&self) -> u32 {
        self.total - self.used + self.front_len() + self.back_len
    }

    /// All blocks.
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    /// Blocks that were handed out before and are free, in the order in which they would be handed out.
    pub(crate) fn returned(&self) -> impl Iterator<Item = u32> + '_ {
        self.front.iter().rev().copied().chain(self.returned_cached())
    }

    fn returned_cached(&self) -> impl Iterator<Item = u32> + '_ {
        let back = std::iter::successors(Some(self.back[0].next), |&block| Some(self.back[block as usize].next));
        back.take(self.back_len as usize)
    }

    fn front_len(&self) -> u32 {
        u32::try_from(self.front.len()).expect("no more than all blocks")
    }

    fn link_last(&mut self, block: u32) {
        let last = self.back[0].before;
        self.back[block as usize] = Link { next: 0, before: last };
        self.back[last as usize].next = block;
        self.back[0].before = block;
        self.back_len += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Link { next, before } = self.back[block as usize];
        self.back[before as usize].next = next;
        self.back[next as usize].before = before;
        self.back_len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All free blocks, in the order in which they would be handed out.
    fn free_queue(pool: &BlockPool) -> Vec<u32> {
        let never_used = pool.used + 1..=pool.total;
        pool.front.iter().rev().copied().chain(never_used).chain(pool.returned_cached()).collect()
    }

    fn take(pool: &mut BlockPool, count: u32) -> Vec<u32> {
        let mut blocks = Vec::new();
        pool.take(count, &mut blocks, |block| panic!("{block} is cached"));
        blocks
    }

    #[test]
    fn ascending_at_first_and_never_block_0() {
        let mut pool = BlockPool::new(3);
        assert_eq!(take(&mut pool, 3), [1, 2, 3]);
        assert_eq!(pool.free(), 0);
    }

    #[test]
    fn plain_blocks_to_the_front_cached_ones_to_the_back() {
        let mut pool = BlockPool::new(6);
        let blocks = take(&mut pool, 4);
        pool.cache(1);
        pool.cache(2);
        pool.release(&blocks);
        assert_eq!(free_queue(&pool), [4, 3, 5, 6, 2, 1]);
        pool.share(2);
        assert_eq!((free_queue(&pool), pool.refs(2), pool.free()), (vec![4, 3, 5, 6, 1], 1, 5));
        assert_eq!(take(&mut pool, 4), [4, 3, 5, 6]);
        let (mut blocks, mut evicted) = (Vec::new(), Vec::new());
        pool.take(1, &mut blocks, |block| evicted.push(block));
        assert_eq!((blocks, evicted, pool.free()), (vec![1], vec![1], 0));
        assert_eq!(pool.cached[1..3], [false, true]);
    }

    #[test]
    #[should_panic(expected = "no more blocks are taken than are free")]
    fn what_is_not_there_is_not_taken() {
        take(&mut BlockPool::new(2), 3);
    }

    #[test]
    fn a_shared_block_lives_on() {
        let mut pool = BlockPool::new(2);
        let blocks = take(&mut pool, 1);
        pool.cache(1);
        pool.share(1);
        pool.release(&blocks);
        assert_eq!((pool.refs(1), pool.free()), (1, 1));
        pool.release(&blocks);
        assert_eq!((pool.refs(1), pool.free()), (0, 2));
    }
}
