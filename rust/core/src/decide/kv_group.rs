//! KV cache groups of an engine: how many blocks of a request each group allocates.

/// A KV cache group: layers of one attention type that share their blocks.
#[derive(Clone, Copy, Debug)]
pub struct KvGroup {
    /// Tokens per block.
    pub block_size: u32,
    /// Blocks per request beyond those that hold its tokens.
    pub extra: u32,
    /// Most blocks per request: a sliding window frees older blocks, and a recurrent state has a fixed number. `None`
    /// means no bound.
    pub blocks_max: Option<u32>,
}

impl KvGroup {
    /// Return the most blocks that a request of `tokens` tokens has in this group.
    pub(super) fn blocks(&self, tokens: u32) -> u64 {
        let blocks = u64::from(tokens.div_ceil(self.block_size)) + u64::from(self.extra);
        self.blocks_max.map_or(blocks, |most| blocks.min(most.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_of_a_group_includes_its_extra_blocks() {
        let full = KvGroup { block_size: 16, extra: 0, blocks_max: None };
        let window = KvGroup { block_size: 16, extra: 1, blocks_max: Some(4) };
        let state = KvGroup { block_size: 1, extra: 2, blocks_max: Some(2) };
        assert_eq!([20, 109].map(|tokens| full.blocks(tokens)), [2, 7]);
        assert_eq!([20, 109].map(|tokens| window.blocks(tokens)), [3, 4]);
        assert_eq!([20, 109].map(|tokens| state.blocks(tokens)), [2, 2]);
    }
}
