//! Planning: `schedule` admits requests and distributes the token budget.

use super::scheduler::{DecodeRun, MixedScheduler, Request, RunningRequest};
use super::step::{Emitted, Planned, Wait};

impl MixedScheduler {
    /// Plan the next step, and return the planned requests in batch order.
    ///
    /// A plan that was not completed is replaced; the requests that it admitted stay admitted.
    pub fn schedule(&mut self) -> &[Planned] {
        self.due = true;
        if self.decode_run.is_none() || self.head_wait() == Some(Wait::Ready) {
            self.replan();
        }
        debug_assert_eq!(self.check(), Ok(()));
        &self.plan
    }

    /// The plan of the last `schedule`, or `None` if it was completed.
    pub fn plan(&self) -> Option<&[Planned]> {
        self.due.then_some(&self.plan)
    }

    /// Number of the plan: it changes whenever `schedule` makes a new plan, and equal numbers mean equal plans.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Number of identical decode steps guaranteed to follow, including the one in flight, if no request is added or
    /// cancelled; 1 unless the plan is one token for each running request.
    pub fn decode_horizon(&self) -> u64 {
        match &self.decode_run {
            Some(run) if self.due && self.head_wait() != Some(Wait::Ready) => run.remaining,
            _ => 1,
        }
    }

    /// Whether completing the plan changes counts only: each planned request emits a token, none finishes, and the next
    /// plan is the same unless a request is admitted or cancelled.
    pub fn is_steady(&self) -> bool {
        self.decode_run.as_ref().is_some_and(|run| run.remaining > 1)
    }

    fn replan(&mut self) {
        self.end_decode_run();
        self.revision += 1;
        self.plan.clear();
        self.unused_budget = self.token_budget;
        let budget = usize::try_from(self.token_budget).unwrap_or(usize::MAX);
        let decoding = self.running.iter().filter(|running| running.prompt_left == 0).take(budget);
        self.plan.extend(decoding.map(|running| Planned { row: running.row, tokens: 1 }));
        let decodes = self.plan.len();
        self.unused_budget -= decodes as u64;

        let all_decode = decodes == self.running.len();
        if !all_decode {
            for running in self.running.iter().filter(|running| running.prompt_left > 0) {
                if self.unused_budget == 0 {
                    break;
                }
                let tokens = running.prompt_left.min(self.unused_budget);
                self.plan.push(Planned { row: running.row, tokens });
                self.unused_budget -= tokens;
            }
        }
        while self.head_wait() == Some(Wait::Ready) {
            let RunningRequest { row, prompt_left, .. } = *self.admit_head();
            let tokens = prompt_left.clamp(1, self.unused_budget);
            self.plan.push(Planned { row, tokens });
            self.unused_budget -= tokens;
        }
        if all_decode && self.running[decodes..].iter().all(|admitted| admitted.prompt_left == 0) {
            self.start_decode_run();
        }
    }

    fn admit_head(&mut self) -> &RunningRequest {
        let row = self.waiting.pop().expect("the queue has a head");
        let Request { added, ticket } = self.requests.get(row).expect("a waiting request is alive");
        self.reserved += added.reservation();
        self.running.push(RunningRequest {
            row,
            ticket: *ticket,
            prompt_left: added.prompt_len - added.prefilled,
            outputs_left: added.max_new - added.generated,
        });
        self.running.last().expect("just admitted")
    }

    fn start_decode_run(&mut self) {
        let Some(remaining) = self.running.iter().map(|running| running.outputs_left).min() else { return };
        self.decode_run = Some(DecodeRun { completed: 0, remaining });
        self.emitted.clear();
        self.emitted.extend(self.plan.iter().map(|planned| Emitted { row: planned.row, finished: false }));
    }

    /// End the run of identical decode steps, and subtract its completed steps from the counts.
    pub(super) fn end_decode_run(&mut self) {
        if let Some(DecodeRun { completed, .. }) = self.decode_run.take() {
            for running in &mut self.running {
                running.outputs_left -= completed;
            }
        }
    }
}
