//! The invariants of the exclusive scheduler, checked after every step in debug builds.

use std::collections::BTreeMap;

use super::request::RequestState;
use super::scheduler::ExclusiveScheduler;
use crate::decide::WorstCase;
use crate::error::Error;

impl ExclusiveScheduler {
    /// Check every invariant: each request is in one state, each block is free or owned, and reservations fit the KV
    /// cache. Returns [`Error::InvariantViolated`] with the first invariant that does not hold.
    pub fn check(&self) -> Result<(), Error> {
        let ensure = |holds: bool, invariant: &str| {
            if holds { Ok(()) } else { Err(Error::InvariantViolated(invariant.to_owned())) }
        };
        self.check_states(&ensure)?;
        self.check_blocks(&ensure)?;
        self.check_running(&ensure)
    }

    fn check_states(&self, ensure: &impl Fn(bool, &str) -> Result<(), Error>) -> Result<(), Error> {
        let mut waiting = 0;
        for row in self.queue.first(usize::MAX) {
            waiting += 1;
            ensure(matches!(self.request(row).state, RequestState::Waiting(_)), "a queued request is waiting")?;
        }
        ensure(waiting == self.queue.len(), "the length of the queue is the number of its requests")?;
        for entry in self.running.iter() {
            let running = self.request(entry.row).state == RequestState::Running;
            ensure(running, "a request in the running table is running")?;
        }
        for &row in self.ended.iter().chain(&self.reported) {
            let ended = matches!(self.request(row).state, RequestState::Ended(_));
            ensure(ended, "a request in the list of ended requests has ended")?;
        }
        let listed = waiting + self.running.len() + self.ended.len() + self.reported.len();
        ensure(listed == self.requests.len(), "every request is in one queue, table or list")?;
        let reporting: usize = self.in_flight.iter().map(|in_flight| in_flight.step.finished.len()).sum();
        ensure(reporting <= self.ended.len(), "steps in flight report only ended requests")
    }

    fn check_blocks(&self, ensure: &impl Fn(bool, &str) -> Result<(), Error>) -> Result<(), Error> {
        let pool = self.kv.pool();
        let mut owners: BTreeMap<u32, u32> = BTreeMap::new();
        for entry in self.running.iter() {
            ensure(self.request(entry.row).slot == Some(entry.slot), "a running request was started in its slot")?;
            let blocks = &self.started[entry.slot as usize].blocks;
            for &block in blocks {
                *owners.entry(block).or_default() += 1;
            }
            let reservation = self.ledger.reservation(entry.row);
            ensure(
                reservation.is_some_and(|reserved| blocks.len() <= reserved as usize),
                "a request has no more blocks than it reserved",
            )?;
        }
        for (&block, &count) in &owners {
            ensure(
                (1..=pool.total()).contains(&block) && pool.refs(block) == count,
                "the references of a block are its owners",
            )?;
        }
        ensure(owners.len() + pool.num_free() as usize == pool.total() as usize, "every block is free or owned")?;
        ensure(pool.returned().all(|block| pool.refs(block) == 0), "a free block has no owner")?;
        let reserved: u32 = self.running.iter().filter_map(|entry| self.ledger.reservation(entry.row)).sum();
        ensure(
            reserved == self.ledger.reserved() && reserved <= self.ledger.usable(),
            "the sum of all reservations is counted and fits the KV cache",
        )?;
        ensure(self.running.len() == self.ledger.slots_used() as usize, "every running request uses one slot")
    }

    fn check_running(&self, ensure: &impl Fn(bool, &str) -> Result<(), Error>) -> Result<(), Error> {
        let WorstCase { lookahead, block_size, .. } = self.worst_case;
        let projected_decoding = self.running.projected_decoding();
        let (mut may_grow, mut first_end) = (0, u32::MAX);
        for (at, entry) in self.running.iter().enumerate() {
            let computed_prompt = entry.computed >= entry.prompt_len;
            ensure(entry.decoding == computed_prompt, "a request with a computed prompt is decoding")?;
            ensure(entry.prefilling() == (at >= projected_decoding), "the prefilling requests are the newest")?;
            ensure(
                entry.computed < entry.end.max(entry.prompt_len) && entry.projected() <= entry.end,
                "a request at its end is not running",
            )?;
            let started = &self.started[entry.slot as usize];
            let kv_slots = started.kv_slots(block_size);
            ensure(entry.projected() <= kv_slots, "planned tokens have KV slots")?;
            if entry.decoding {
                first_end = first_end.min(entry.end - entry.computed);
                let end_at = self.running.clock() + u64::from(entry.end - entry.computed);
                ensure(started.end_at == end_at, "a decoding request ends at its end clock")?;
                if started.may_grow(self.worst_case) {
                    may_grow += 1;
                    let next_block_at = self.running.clock() + u64::from(kv_slots - lookahead - entry.computed);
                    ensure(
                        started.next_block_at == next_block_at,
                        "a decoding request needs a block at its block clock",
                    )?;
                }
            }
            let planned: u32 = self
                .in_flight
                .iter()
                .filter_map(|in_flight| {
                    let at = in_flight.step.rows.iter().position(|&row| row == entry.row)?;
                    Some(in_flight.step.tokens(at))
                })
                .sum();
            ensure(entry.planned == planned, "planned tokens are those of the steps in flight")?;
        }
        ensure(
            self.running.decoding() == 0 || self.running.horizon() == first_end,
            "the next end is that of a decoding request",
        )?;
        ensure(self.blocks_due.len() == may_grow, "every decoding request that may need blocks is in a group")
    }
}
