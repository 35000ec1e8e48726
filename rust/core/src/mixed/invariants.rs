//! The conservation laws of the token-budget scheduler.

use super::scheduler::MixedScheduler;
use crate::error::Error;

impl MixedScheduler {
    /// Verifies the conservation laws; [`Error::Broken`] names the first that does not hold, which is a fault
    /// of the core. Its cost grows with the number of live requests.
    pub fn check(&self) -> Result<(), Error> {
        let law = |holds: bool, what: &str| if holds { Ok(()) } else { Err(Error::Broken(what.to_owned())) };
        let start = |row| self.rows.get(row).ok_or_else(|| Error::Broken("a queued request is gone".to_owned()));

        let mut reserved = 0;
        let mut last_ticket = None;
        let mut queued = 0;
        for running in &self.running {
            let request = start(running.row)?;
            reserved += request.start.reservation();
            law(running.ticket == request.ticket, "a running request has two tickets")?;
            let done = self.run.as_ref().map_or(0, |run| run.done);
            law(running.outputs_left > done, "a finished request still runs")?;
        }
        law(reserved == self.reserved, "reserved differs from the sum over the running requests")?;
        law(reserved <= self.kv_tokens, "reserved is above kv_tokens")?;
        law(self.running.len() as u64 <= self.max_seqs, "more than max_seqs requests run")?;
        for row in self.running().chain(self.waiting()) {
            let ticket = Some(start(row)?.ticket);
            law(last_ticket < ticket, "the queues are out of order, or a request is queued twice")?;
            last_ticket = ticket;
            queued += 1;
        }
        law(queued == self.rows.len(), "a live request is in no queue")?;
        let planned: u64 = self.plan.iter().map(|planned| planned.tokens).sum();
        law(planned <= self.token_budget, "the plan is above token_budget")
    }
}
