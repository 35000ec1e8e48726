//! The KV blocks of the reference model, in three lists.

/// The tokens up to the end of a block: token ids, or segment ids with offsets.
pub(crate) type Content = Vec<(Option<u64>, u32)>;

#[derive(Clone, Debug)]
pub(crate) struct Pool {
    /// Free blocks; the first is allocated next.
    pub(crate) free: Vec<u32>,
    /// References by block. Block 0 does not exist.
    references: Vec<u32>,
    /// Cached blocks and their contents, in order of registration.
    contents: Vec<(u32, Content)>,
}

impl Pool {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { free: (1..=blocks).collect(), references: vec![0; blocks as usize + 1], contents: Vec::new() }
    }

    pub(crate) fn allocate(&mut self) -> u32 {
        let block = self.free.remove(0);
        self.contents.retain(|&(other, _)| other != block);
        self.references[block as usize] = 1;
        block
    }

    pub(crate) fn share(&mut self, content: &Content) -> Option<u32> {
        let block = self.contents.iter().find(|(_, cached)| cached == content)?.0;
        self.free.retain(|&other| other != block);
        self.references[block as usize] += 1;
        Some(block)
    }

    pub(crate) fn register(&mut self, block: u32, content: Content) {
        if !self.is_registered(block) {
            self.contents.push((block, content));
        }
    }

    fn is_registered(&self, block: u32) -> bool {
        self.contents.iter().any(|&(other, _)| other == block)
    }

    pub(crate) fn release(&mut self, blocks: &[u32]) {
        for &block in blocks {
            self.references[block as usize] -= 1;
        }
        let free = blocks.iter().rev().copied().filter(|&block| self.references[block as usize] == 0);
        let (cached, uncached): (Vec<u32>, Vec<u32>) = free.partition(|&block| self.is_registered(block));
        self.free = [uncached, self.free.clone(), cached].concat();
    }
}
