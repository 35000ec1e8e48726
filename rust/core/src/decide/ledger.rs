//! Admission: whether a request gets a batch slot and a KV reservation, and the reason if it does not.
//!
//! An admitted request reserves its worst case, so a running request can always allocate its next block and no request
//! is ever preempted. Reservations ignore blocks shared through the prefix cache: sharing only lowers the real need.

use crate::config::KvAdmission;
use crate::error::Error;
use crate::request::Row;

/// Why the head of the queue is waiting. Admission tests `Slots` to `Kv` in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Wait {
    /// The caller has paused the scheduler.
    Paused,
    /// Every waiting request waits for an event outside the scheduler.
    Blocked,
    /// Every batch slot is in use.
    Slots,
    /// A running request is still prefilling, and its prompt comes first.
    PrefillInProgress,
    /// The step has `max_prefills_per_batch` prompts, or the head's prompt does not fit in full beside them.
    PrefillBatchFull,
    /// The worst case of the head does not fit the KV cache beside the reservations.
    Kv,
    /// The head fits, but decode steps are due under the interleave bound.
    Interleave,
    /// The head fits, but the caller asked for no prefills.
    Throttled,
    /// The head fits, but a step is in flight.
    StepRunning,
    /// The head fits: the next step admits it.
    Ready,
}

impl Wait {
    /// Stable name, for metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Paused => "paused",
            Self::Blocked => "blocked",
            Self::Slots => "slots",
            Self::PrefillInProgress => "prefill_in_progress",
            Self::PrefillBatchFull => "prefill_batch_full",
            Self::Kv => "kv",
            Self::Interleave => "interleave",
            Self::Throttled => "throttled",
            Self::StepRunning => "step_running",
            Self::Ready => "ready",
        }
    }
}

/// The rule for the most KV blocks that a request can need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorstCase {
    /// Whether the bound is `max_tokens` or `max_model_len`.
    pub rule: KvAdmission,
    /// Tokens per block.
    pub block_size: u32,
    /// Length of the longest sequence, in tokens.
    pub max_model_len: u32,
    /// KV slots kept beyond the last token, for speculative tokens.
    pub lookahead: u32,
}

impl WorstCase {
    /// Return the most blocks of a request with `prompt` prompt tokens and at most `outputs` output tokens.
    pub fn blocks(&self, prompt: u32, outputs: u32) -> u32 {
        self.tokens(prompt, outputs).div_ceil(self.block_size)
    }

    /// Return the most KV slots of a request with `prompt` prompt tokens and at most `outputs` output tokens, including
    /// the lookahead. The last output is never written to the KV cache.
    pub fn tokens(&self, prompt: u32, outputs: u32) -> u32 {
        let last = match self.rule {
            KvAdmission::MaxModelLen => self.max_model_len,
            KvAdmission::Reserve => self.capped(u64::from(prompt) + u64::from(outputs) - 1),
        };
        last.max(prompt)
    }

    /// Return the number of blocks for `tokens` tokens and the lookahead.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        self.kv_slots_for(tokens).div_ceil(self.block_size)
    }

    /// Return the number of KV slots for `tokens` tokens and the lookahead.
    pub fn kv_slots_for(&self, tokens: u32) -> u32 {
        self.capped(u64::from(tokens)).max(tokens)
    }

    /// Return `tokens` plus the lookahead, at most `max_model_len`.
    fn capped(&self, tokens: u64) -> u32 {
        let most = u64::from(self.max_model_len);
        u32::try_from((tokens + u64::from(self.lookahead)).min(most)).expect("max_model_len is 32 bits")
    }
}

/// The head of the queue, as input of [`Ledger::refuse`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Candidate {
    /// Worst-case KV blocks of the request.
    pub needed_blocks: u32,
    /// Handle of the request, if it has a reservation already.
    pub row: Option<Row>,
    /// Whether a running request is prefilling.
    pub prefill_in_progress: bool,
    /// Whether the prompts of this step leave no capacity for the request.
    pub batch_full: bool,
}

#[derive(Clone, Copy, Debug)]
struct Reservation {
    blocks: u32,
    has_slot: bool,
}

/// The batch slots in use and the reserved KV blocks.
#[derive(Clone, Debug)]
pub struct Ledger {
    slots: u32,
    usable: u32,
    watermark: u32,
    /// By row index.
    reservations: Vec<Option<Reservation>>,
    slots_used: u32,
    num_reservations: u32,
    reserved: u32,
}

impl Ledger {
    /// Return a ledger of `slots` batch slots and `usable` KV blocks, all free.
    pub fn new(slots: u32, usable: u32) -> Self {
        Self { slots, usable, watermark: 0, reservations: Vec::new(), slots_used: 0, num_reservations: 0, reserved: 0 }
    }

    /// Keep `blocks` more KV blocks free whenever a request is admitted while others have reservations.
    #[must_use]
    pub fn with_watermark(self, blocks: u32) -> Self {
        Self { watermark: blocks, ..self }
    }

    /// Return [`Error::NeverFits`] if `needed_blocks` is larger than the whole KV cache.
    pub fn fits_ever(&self, needed_blocks: u32) -> Result<(), Error> {
        if needed_blocks > self.usable {
            return Err(Error::NeverFits { needed: needed_blocks.into(), usable: self.usable.into(), unit: "blocks" });
        }
        Ok(())
    }

    /// Return why the candidate is not admitted now, or `None` if it fits.
    pub fn refuse(&self, candidate: &Candidate) -> Option<Wait> {
        let reservation = candidate.row.and_then(|row| self.get(row));
        let has_slot = reservation.is_some_and(|reservation| reservation.has_slot);
        if !has_slot && self.slots_used >= self.slots {
            Some(Wait::Slots)
        } else if candidate.prefill_in_progress {
            Some(Wait::PrefillInProgress)
        } else if candidate.batch_full {
            Some(Wait::PrefillBatchFull)
        } else if reservation.is_none()
            && candidate.needed_blocks > self.usable.saturating_sub(self.reserved_with_watermark())
        {
            Some(Wait::Kv)
        } else {
            None
        }
    }

    /// Reserve `blocks` KV blocks and a batch slot for `row`.
    pub fn admit(&mut self, row: Row, blocks: u32) {
        self.reserve(row, blocks);
        self.take_slot(row);
    }

    /// Reserve `blocks` KV blocks for `row`, without a batch slot.
    pub fn reserve(&mut self, row: Row, blocks: u32) {
        if self.reservations.len() <= row.index() {
            self.reservations.resize(row.index() + 1, None);
        }
        let before = self.reservations[row.index()].replace(Reservation { blocks, has_slot: false });
        assert!(before.is_none(), "a request reserves once");
        self.num_reservations += 1;
        self.reserved += blocks;
    }

    /// Give `row`, which has a reservation, a batch slot unless it has one.
    pub fn take_slot(&mut self, row: Row) {
        let reservation = self.reservations[row.index()].as_mut().expect("a request with a slot has a reservation");
        self.slots_used += u32::from(!reservation.has_slot);
        reservation.has_slot = true;
    }

    /// Free the batch slot of `row`, if it has one. Its blocks stay reserved.
    pub fn free_slot(&mut self, row: Row) {
        let reservation = self.reservations[row.index()].as_mut().expect("a request with a slot has a reservation");
        self.slots_used -= u32::from(reservation.has_slot);
        reservation.has_slot = false;
    }

    /// Release the batch slot and the reservation of `row`.
    pub fn release(&mut self, row: Row) {
        self.free_slot(row);
        let reservation = self.reservations[row.index()].take().expect("a request has a reservation until its release");
        self.num_reservations -= 1;
        self.reserved -= reservation.blocks;
    }

    /// Return the number of blocks reserved by `row`, or `None` if it has no reservation.
    pub fn reservation(&self, row: Row) -> Option<u32> {
        self.get(row).map(|reservation| reservation.blocks)
    }

    /// Number of batch slots in use.
    pub fn slots_used(&self) -> u32 {
        self.slots_used
    }

    /// Number of KV blocks in all reservations.
    pub fn reserved(&self) -> u32 {
        self.reserved
    }

    /// Number of KV blocks of the whole cache.
    pub fn usable(&self) -> u32 {
        self.usable
    }

    fn get(&self, row: Row) -> Option<Reservation> {
        self.reservations.get(row.index()).copied().flatten()
    }

    /// Blocks that are not available to a new request.
    fn reserved_with_watermark(&self) -> u32 {
        self.reserved + if self.num_reservations > 0 { self.watermark } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Slab;

    const RULE: WorstCase = WorstCase { rule: KvAdmission::Reserve, block_size: 16, max_model_len: 128, lookahead: 0 };

    #[test]
    fn v25_the_last_token_needs_no_kv_slot() {
        let blocks =
            [(60, 4), (61, 4), (62, 4), (64, 1), (64, 2)].map(|(prompt, outputs)| RULE.blocks(prompt, outputs));
        assert_eq!(blocks, [4, 4, 5, 4, 5]);
    }

    #[test]
    fn lookahead_is_capped_by_max_model_len() {
        let rule = WorstCase { lookahead: 40, ..RULE };
        assert_eq!((rule.blocks(60, 4), rule.blocks(120, 8), rule.blocks_for(1)), (7, 8, 3));
        let longest = WorstCase { rule: KvAdmission::MaxModelLen, ..RULE };
        assert_eq!(longest.blocks(1, 1), 8);
    }

    #[test]
    fn refusal_reasons_are_tested_in_order() {
        let mut slab = Slab::default();
        let rows = [slab.insert(()), slab.insert(())];
        let mut ledger = Ledger::new(2, 10);
        ledger.admit(rows[0], 6);
        let all = Candidate { needed_blocks: 5, prefill_in_progress: true, batch_full: true, ..Candidate::default() };
        let part = Candidate { prefill_in_progress: false, ..all };
        let kv = Candidate { batch_full: false, ..part };
        assert_eq!(ledger.refuse(&all), Some(Wait::PrefillInProgress));
        assert_eq!(ledger.refuse(&part), Some(Wait::PrefillBatchFull));
        assert_eq!(ledger.refuse(&kv), Some(Wait::Kv));
        let fits = Candidate { needed_blocks: 4, batch_full: false, ..part };
        assert_eq!(ledger.refuse(&fits), None);
        ledger.admit(rows[1], 4);
        assert_eq!(ledger.refuse(&all), Some(Wait::Slots));
        ledger.release(rows[0]);
        assert_eq!((ledger.slots_used(), ledger.reserved(), ledger.reservation(rows[0])), (1, 4, None));
        assert!(ledger.fits_ever(10).is_ok() && ledger.fits_ever(11).is_err());
    }

    #[test]
    fn a_request_with_a_reservation_needs_only_a_slot() {
        let mut slab = Slab::default();
        let rows = [slab.insert(()), slab.insert(())];
        let mut ledger = Ledger::new(1, 10).with_watermark(2);
        let ask = |ledger: &Ledger, needed_blocks, row| {
            ledger.refuse(&Candidate { needed_blocks, row, ..Candidate::default() })
        };
        assert_eq!((ask(&ledger, 10, None), ask(&ledger, 11, None)), (None, Some(Wait::Kv)));
        ledger.reserve(rows[0], 6);
        assert_eq!((ask(&ledger, 2, None), ask(&ledger, 3, None)), (None, Some(Wait::Kv)));
        assert_eq!(ask(&ledger, 6, Some(rows[0])), None);
        ledger.admit(rows[1], 2);
        assert_eq!(ask(&ledger, 6, Some(rows[0])), Some(Wait::Slots));
        assert_eq!(ask(&ledger, 2, Some(rows[1])), None);
        ledger.free_slot(rows[1]);
        ledger.take_slot(rows[0]);
        assert_eq!((ledger.slots_used(), ledger.reserved()), (1, 8));
        ledger.release(rows[0]);
        ledger.release(rows[1]);
        assert_eq!((ledger.slots_used(), ledger.reserved()), (0, 0));
    }
}
