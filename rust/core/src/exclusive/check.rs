//! The conservation laws, as code.

use std::collections::BTreeMap;

use super::{ExclusiveScheduler, Place};
use crate::error::Error;

impl ExclusiveScheduler {
    /// Verifies what must always hold: every request is in one place, every block is free or owned,
    /// promises are kept. Runs after every step in debug builds. An error is a fault of the core.
    pub fn check(&self) -> Result<(), Error> {
        let law = |holds: bool, text: &str| if holds { Ok(()) } else { Err(Error::Broken(text.to_owned())) };
        self.check_places(&law)?;
        self.check_blocks(&law)?;
        self.check_lanes(&law)
    }

    fn check_places(&self, law: &impl Fn(bool, &str) -> Result<(), Error>) -> Result<(), Error> {
        let mut waiting = 0;
        for row in self.queue.first(usize::MAX) {
            waiting += 1;
            law(matches!(self.request(row).place, Place::Waiting(_)), "who is in the queue waits")?;
        }
        law(waiting == self.queue.len(), "the queue knows its length")?;
        for lane in self.lanes.iter() {
            law(self.request(lane.row).place == Place::Running, "who has a lane runs")?;
        }
        for &row in self.ended.iter().chain(&self.delivered) {
            law(matches!(self.request(row).place, Place::Ended(_)), "who is to be reported has ended")?;
        }
        let placed = waiting + self.lanes.len() + self.ended.len() + self.delivered.len();
        law(placed == self.requests.len(), "every request is in one place")?;
        let carried: usize = self.pending.iter().map(|pending| pending.step.finished.len()).sum();
        law(carried <= self.ended.len(), "only ends that happened are carried")
    }

    fn check_blocks(&self, law: &impl Fn(bool, &str) -> Result<(), Error>) -> Result<(), Error> {
        let pool = self.kv.pool();
        let mut owners: BTreeMap<u32, u32> = BTreeMap::new();
        for lane in self.lanes.iter() {
            let run = self.request(lane.row).run.as_deref();
            let blocks = &run.ok_or_else(|| Error::Broken("who runs was started".to_owned()))?.blocks;
            for &block in blocks {
                *owners.entry(block).or_default() += 1;
            }
            law(
                blocks.len() * self.worst_case.block_size as usize == lane.capacity as usize,
                "a lane knows its slots",
            )?;
            law(
                self.ledger.held(lane.row).is_some_and(|need| blocks.len() <= need as usize),
                "nobody holds more than it reserved",
            )?;
        }
        for (&block, &count) in &owners {
            law(
                (1..=pool.total()).contains(&block) && pool.refs(block) == count,
                "a block's references are its owners",
            )?;
        }
        law(owners.len() + pool.free() as usize == pool.total() as usize, "free and owned blocks are all blocks")?;
        law(pool.free_queue().iter().all(|&block| pool.refs(block) == 0), "a free block has no owner")?;
        let reserved: u32 = self.lanes.iter().filter_map(|lane| self.ledger.held(lane.row)).sum();
        law(reserved == self.ledger.reserved() && reserved <= self.ledger.usable(), "promises are within the cache")?;
        law(self.lanes.len() == self.ledger.holders() as usize, "who runs holds a slot")
    }

    fn check_lanes(&self, law: &impl Fn(bool, &str) -> Result<(), Error>) -> Result<(), Error> {
        let done = self.lanes.iter().take_while(|lane| !lane.prefilling()).count();
        law(self.lanes.decoding() == done, "prompts that are part done are the newest")?;
        for lane in self.lanes.iter() {
            law(lane.computed < lane.end.max(lane.prompt) && lane.projected() <= lane.end, "who is done has left")?;
            law(lane.projected() <= lane.capacity, "planned tokens have slots")?;
            let planned: u32 = self
                .pending
                .iter()
                .filter_map(|pending| {
                    let at = pending.step.rows.iter().position(|&row| row == lane.row)?;
                    Some(pending.step.tokens(at))
                })
                .sum();
            law(lane.planned == planned, "planned tokens are those of the planned steps")?;
        }
        Ok(())
    }
}
