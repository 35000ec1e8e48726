//! When those that decode need their next KV block.
//!
//! A block lasts for as many steps as it has slots. So a request needs blocks at clocks that are equal modulo
//! the block size for as long as it decodes, and each step looks at one slot of a wheel of that size.

/// Block sizes above this would need a wheel of too many slots; one slot then holds everybody.
const SLOTS_MAX: u32 = 1 << 16;

/// Seats of requests at the clock at which they need a block, modulo the block size.
#[derive(Clone, Debug)]
pub(super) struct Wheel {
    slots: Vec<Vec<u32>>,
}

impl Wheel {
    pub(super) fn new(block_size: u32) -> Self {
        let slots = if block_size <= SLOTS_MAX { block_size as usize } else { 1 };
        Self { slots: vec![Vec::new(); slots] }
    }

    /// Those that may need a block at `clock`, in the order in which they came.
    pub(super) fn slot(&mut self, clock: u64) -> &mut Vec<u32> {
        let at = self.at(clock);
        &mut self.slots[at]
    }

    /// The slots of `steps` clocks from `clock` on, each with its clock.
    pub(super) fn turn(&mut self, clock: u64, steps: u32, mut visit: impl FnMut(u64, &mut Vec<u32>)) {
        let mut at = self.at(clock);
        for clock in clock..clock + u64::from(steps) {
            let slot = &mut self.slots[at];
            if !slot.is_empty() {
                visit(clock, slot);
            }
            at = if at + 1 < self.slots.len() { at + 1 } else { 0 };
        }
    }

    /// Takes out a request that would next need a block at `clock`.
    pub(super) fn remove(&mut self, clock: u64, seat: u32) {
        let slot = self.slot(clock);
        let at = slot.iter().position(|&other| other == seat).expect("who decodes is on the wheel");
        slot.remove(at);
    }

    fn at(&self, clock: u64) -> usize {
        usize::try_from(clock % self.slots.len() as u64).expect("below the number of slots")
    }

    /// How many are on it.
    pub(super) fn len(&self) -> usize {
        self.slots.iter().map(Vec::len).sum()
    }
}
