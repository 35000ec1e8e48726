//! Decoding requests grouped by the decode step in which each needs its next KV block.
//!
//! A block holds `block_size` tokens, so a decoding request needs blocks at clocks that are equal modulo the block
//! size. Each decode step looks at one of `block_size` groups, not at every request.

/// Most groups. With a larger block size there is one group, which holds every request.
const GROUPS_MAX: u32 = 1 << 16;

/// Batch slots of decoding requests, grouped by the clock of the next block modulo the block size.
#[derive(Clone, Debug)]
pub(super) struct BlocksDue {
    groups: Vec<Vec<u32>>,
}

impl BlocksDue {
    pub(super) fn new(block_size: u32) -> Self {
        let groups = if block_size <= GROUPS_MAX { block_size as usize } else { 1 };
        Self { groups: vec![Vec::new(); groups] }
    }

    /// Return the requests that may need a block at `clock`, in the order in which they were added.
    pub(super) fn group(&mut self, clock: u64) -> &mut Vec<u32> {
        let at = self.at(clock);
        &mut self.groups[at]
    }

    /// Call `visit` with each of the `steps` clocks from `clock` on, and its group unless that is empty.
    pub(super) fn visit(&mut self, clock: u64, steps: u32, mut visit: impl FnMut(u64, &mut Vec<u32>)) {
        let mut at = self.at(clock);
        for clock in clock..clock + u64::from(steps) {
            let group = &mut self.groups[at];
            if !group.is_empty() {
                visit(clock, group);
            }
            at = if at + 1 < self.groups.len() { at + 1 } else { 0 };
        }
    }

    /// Remove the request in `slot`; its next block is due at `clock`.
    pub(super) fn remove(&mut self, clock: u64, slot: u32) {
        let group = self.group(clock);
        let at = group.iter().position(|&other| other == slot).expect("a decoding request is in its group");
        group.remove(at);
    }

    fn at(&self, clock: u64) -> usize {
        usize::try_from(clock % self.groups.len() as u64).expect("below the number of groups")
    }

    /// Number of requests in all groups.
    pub(super) fn len(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }
}
