//! KV blocks in three lists.

/// What the tokens up to the end of a block are: ids, or places in a segment.
pub(crate) type Content = Vec<(Option<u64>, u32)>;

#[derive(Clone, Debug)]
pub(crate) struct Pool {
    /// The front is handed out next.
    pub(crate) free: Vec<u32>,
    /// References by block; block 0 does not exist.
    references: Vec<u32>,
    /// In order of registration.
    contents: Vec<(u32, Content)>,
}

impl Pool {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { free: (1..=blocks).collect(), references: vec![0; blocks as usize + 1], contents: Vec::new() }
    }

    pub(crate) fn take(&mut self) -> u32 {
        let block = self.free.remove(0);
        self.contents.retain(|&(other, _)| other != block);
        self.references[block as usize] = 1;
        block
    }

    pub(crate) fn share(&mut self, content: &Content) -> Option<u32> {
        let block = self.contents.iter().find(|(_, held)| held == content)?.0;
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
        let gone = blocks.iter().rev().copied().filter(|&block| self.references[block as usize] == 0);
        let (hashed, unhashed): (Vec<u32>, Vec<u32>) = gone.partition(|&block| self.is_registered(block));
        self.free = [unhashed, self.free.clone(), hashed].concat();
    }
}
