//! Why the head of the queue waits.

use super::scheduler::{ExclusiveScheduler, Pending};
use crate::decide::Wait;
use crate::request::Row;

/// Why the head of the queue waits, and the numbers behind it, in KV blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The head.
    pub row: Row,
    /// Why.
    pub wait: Wait,
    /// What it needs at worst.
    pub needed: u32,
    /// What running requests have reserved.
    pub reserved: u32,
    /// The whole cache.
    pub usable: u32,
}

impl ExclusiveScheduler {
    /// Why the head waits, as of now; `None` when nothing waits.
    pub fn explain(&self) -> Option<Explanation> {
        let (row, refused) = self.refused_head()?;
        let needed = self.request(row).need;
        // What was found when the pending step was planned holds while somebody is left in that step.
        let held = |pending: &&Pending| (0..pending.step.rows.len()).any(|at| !pending.is_dropped(at, &self.requests));
        let left = self.pending.back().filter(held).and_then(|pending| pending.left).filter(|&(head, _)| head == row);
        let refused = match (refused, left) {
            // Tested before the cache; true while the step that left no room is pending.
            (None | Some(Wait::Kv), Some((_, wait @ (Wait::PrefillInProgress | Wait::PrefillBatchFull)))) => Some(wait),
            (refused, _) => refused,
        };
        let held_back = || match left {
            Some((_, wait @ (Wait::Interleave | Wait::Throttled))) => wait,
            _ if !self.pending.is_empty() => Wait::StepRunning,
            _ if self.decide(&self.phase, false).interleaved => Wait::Interleave,
            _ => Wait::Ready,
        };
        let (reserved, usable) = (self.ledger.reserved(), self.ledger.usable());
        Some(Explanation { row, wait: refused.unwrap_or_else(held_back), needed, reserved, usable })
    }
}
