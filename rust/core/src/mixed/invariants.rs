//! The invariants of the token-budget scheduler, checked after every step in debug builds.

use super::scheduler::MixedScheduler;
use crate::error::Error;

impl MixedScheduler {
    /// Check every invariant. O(live requests). Returns [`Error::InvariantViolated`] with the first invariant that does
    /// not hold.
    pub fn check(&self) -> Result<(), Error> {
        let violated = |invariant: &str| Error::InvariantViolated(invariant.to_owned());
        let ensure = |holds: bool, invariant: &str| if holds { Ok(()) } else { Err(violated(invariant)) };
        let live = |row| self.requests.get(row).ok_or_else(|| violated("a queued request is alive"));

        let mut reserved = 0;
        let mut last_ticket = None;
        let mut queued = 0;
        for running in &self.running {
            let request = live(running.row)?;
            reserved += request.added.reservation();
            ensure(running.ticket == request.ticket, "a running request has one ticket")?;
            let completed = self.decode_run.as_ref().map_or(0, |run| run.completed);
            ensure(running.outputs_left > completed, "a running request has outputs left")?;
        }
        ensure(reserved == self.reserved, "reserved is the sum over the running requests")?;
        ensure(reserved <= self.kv_tokens, "reserved is at most kv_tokens")?;
        ensure(self.running.len() as u64 <= self.max_seqs, "at most max_seqs requests are running")?;
        for row in self.running().chain(self.waiting()) {
            let ticket = Some(live(row)?.ticket);
            ensure(last_ticket < ticket, "the queues are in order, and no request is queued twice")?;
            last_ticket = ticket;
            queued += 1;
        }
        ensure(queued == self.requests.len(), "a live request is in a queue")?;
        let planned: u64 = self.plan.iter().map(|planned| planned.tokens).sum();
        ensure(planned <= self.token_budget, "the plan is within token_budget")
    }
}
