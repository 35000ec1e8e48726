//! The conservation laws, as code.

use std::collections::BTreeMap;

use super::request::Place;
use super::scheduler::ExclusiveScheduler;
use crate::decide::WorstCase;
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
            law(self.request(lane.row).seat == Some(lane.seat), "who runs was started")?;
            let blocks = &self.started[lane.seat as usize].blocks;
            for &block in blocks {
                *owners.entry(block).or_default() += 1;
            }
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
        law(pool.returned().all(|block| pool.refs(block) == 0), "a free block has no owner")?;
        let reserved: u32 = self.lanes.iter().filter_map(|lane| self.ledger.held(lane.row)).sum();
        law(reserved == self.ledger.reserved() && reserved <= self.ledger.usable(), "promises are within the cache")?;
        law(self.lanes.len() == self.ledger.seated() as usize, "who runs holds a slot")
    }

    fn check_lanes(&self, law: &impl Fn(bool, &str) -> Result<(), Error>) -> Result<(), Error> {
        let WorstCase { lookahead, block_size, .. } = self.worst_case;
        let then = self.lanes.decoding_then();
        let (mut on_wheel, mut first_end) = (0, u32::MAX);
        for (at, lane) in self.lanes.iter().enumerate() {
            law(lane.decoding == (lane.computed >= lane.prompt), "who has its prompt done decodes")?;
            law(lane.prefilling() == (at >= then), "prompts that are part done are the newest")?;
            law(lane.computed < lane.end.max(lane.prompt) && lane.projected() <= lane.end, "who is done has left")?;
            let started = &self.started[lane.seat as usize];
            let slots = started.slots(block_size);
            law(lane.projected() <= slots, "planned tokens have slots")?;
            if lane.decoding {
                first_end = first_end.min(lane.end - lane.computed);
                let end_at = self.lanes.clock() + u64::from(lane.end - lane.computed);
                law(started.end_at == end_at, "who decodes knows its end")?;
                if started.may_grow(self.worst_case) {
                    on_wheel += 1;
                    let need_at = self.lanes.clock() + u64::from(slots - lookahead - lane.computed);
                    law(started.need_at == need_at, "who decodes knows when it needs a block")?;
                }
            }
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
        law(self.lanes.decoding() == 0 || self.lanes.horizon() == first_end, "the first end is known")?;
        law(self.wheel.len() == on_wheel, "who decodes and may need blocks is on the wheel")
    }
}
