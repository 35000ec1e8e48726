//! Why the head of the queue is waiting.

use super::scheduler::{ExclusiveScheduler, InFlight};
use crate::decide::Wait;
use crate::request::Row;

/// Why the head of the queue is waiting, with counts in KV blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The head of the queue.
    pub row: Row,
    /// The reason.
    pub wait: Wait,
    /// Worst-case KV blocks of the head.
    pub needed: u32,
    /// KV blocks reserved by running requests.
    pub reserved: u32,
    /// KV blocks of the whole cache.
    pub usable: u32,
}

impl ExclusiveScheduler {
    /// Return why the head of the queue is waiting now, or `None` if no request is waiting.
    pub fn explain(&self) -> Option<Explanation> {
        let (row, refused) = self.refused_head()?;
        let needed = self.request(row).needed_blocks;
        // The reason found when the newest step was planned is valid while a request of that step is running.
        let has_live_row =
            |in_flight: &&InFlight| (0..in_flight.step.rows.len()).any(|at| !in_flight.is_dropped(at, &self.requests));
        let planned = self.in_flight.back().filter(has_live_row).and_then(|in_flight| in_flight.head_wait);
        let planned = planned.filter(|&(head, _)| head == row);
        let refused = match (refused, planned) {
            // Admission tests these two before the KV cache, and they hold until the step in flight is completed.
            (None | Some(Wait::Kv), Some((_, wait @ (Wait::PrefillInProgress | Wait::PrefillBatchFull)))) => Some(wait),
            (refused, _) => refused,
        };
        let held_back = || match planned {
            Some((_, wait @ (Wait::Interleave | Wait::Throttled))) => wait,
            _ if !self.in_flight.is_empty() => Wait::StepRunning,
            _ if self.decide(&self.phase, false).interleaved => Wait::Interleave,
            _ => Wait::Ready,
        };
        let (reserved, usable) = (self.ledger.reserved(), self.ledger.usable());
        Some(Explanation { row, wait: refused.unwrap_or_else(held_back), needed, reserved, usable })
    }
}
