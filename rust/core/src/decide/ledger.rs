//! Admission: who may hold a slot and KV blocks, and why somebody may not yet.
//!
//! A request reserves its worst case when it starts, so a running request can always go on and nobody is
//! ever preempted. Sharing by content is ignored here, which errs on the safe side.

use crate::config::KvAdmission;
use crate::error::Error;
use crate::request::Row;

/// Why the head of the queue waits. `Slots` to `Kv` are admission's, in the order in which they are tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Wait {
    /// The caller has paused the scheduler.
    Paused,
    /// Nobody who waits is ready: all wait for something outside the scheduler.
    Blocked,
    /// Every slot is held.
    Slots,
    /// A prompt is part done and goes first.
    PrefillInProgress,
    /// As many prompts start in this step as may, or their tokens fill the largest bucket.
    PrefillBatchFull,
    /// The KV cache cannot take its worst case besides everybody else's.
    Kv,
    /// It may start, but decode steps are owed to the running requests.
    Interleave,
    /// It may start, but the caller asked to hold prefills back.
    Throttled,
    /// It may start, but a step is running.
    StepRunning,
    /// Nothing holds it: the next step starts it.
    Ready,
}

impl Wait {
    /// The stable name, for metrics and messages.
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

/// The most KV blocks that a request can come to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorstCase {
    /// Which rule counts.
    pub rule: KvAdmission,
    /// Tokens of a block.
    pub block_size: u32,
    /// The longest sequence.
    pub max_model_len: u32,
    /// Tokens beyond the next one for which slots are kept.
    pub lookahead: u32,
}

impl WorstCase {
    /// Blocks of a request with that prompt that emits at most `outputs` tokens. The last token is never
    /// written to the cache, hence the `- 1`.
    pub fn blocks(&self, prompt: u32, outputs: u32) -> u32 {
        self.tokens(prompt, outputs).div_ceil(self.block_size)
    }

    /// Tokens in the cache of such a request, those kept beyond the last one included.
    pub fn tokens(&self, prompt: u32, outputs: u32) -> u32 {
        let last = match self.rule {
            KvAdmission::MaxModelLen => self.max_model_len,
            KvAdmission::Reserve => self.capped(u64::from(prompt) + u64::from(outputs) - 1),
        };
        last.max(prompt)
    }

    /// Blocks that hold `tokens` and the slots kept beyond them.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        self.slots_for(tokens).div_ceil(self.block_size)
    }

    /// Slots for `tokens` and those kept beyond them.
    pub fn slots_for(&self, tokens: u32) -> u32 {
        self.capped(u64::from(tokens)).max(tokens)
    }

    fn capped(&self, tokens: u64) -> u32 {
        let most = u64::from(self.max_model_len);
        u32::try_from((tokens + u64::from(self.lookahead)).min(most)).expect("max_model_len is 32 bits")
    }
}

/// What admission is asked about the head of the queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct Candidate {
    /// Blocks that it needs at worst.
    pub need: u32,
    /// Its row, where it holds blocks already.
    pub row: Option<Row>,
    /// Whether a prompt is part done.
    pub prefill_in_progress: bool,
    /// Whether the prompts chosen for this step leave no room for it.
    pub batch_full: bool,
}

/// What one request holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    need: u32,
    seated: bool,
}

/// Slots and promised KV blocks.
#[derive(Clone, Debug)]
pub struct Ledger {
    slots: u32,
    usable: u32,
    watermark: u32,
    /// By row index; `None` where nothing is held.
    held: Vec<Option<Held>>,
    seated: u32,
    holders: u32,
    reserved: u32,
}

impl Ledger {
    /// A ledger over `slots` places in the batch and `usable` KV blocks.
    pub fn new(slots: u32, usable: u32) -> Self {
        Self { slots, usable, watermark: 0, held: Vec::new(), seated: 0, holders: 0, reserved: 0 }
    }

    /// Keeps `blocks` more free whenever a request starts while others hold blocks.
    #[must_use]
    pub fn with_watermark(self, blocks: u32) -> Self {
        Self { watermark: blocks, ..self }
    }

    /// Refuses what would not fit an empty cache.
    pub fn fits_ever(&self, need: u32) -> Result<(), Error> {
        if need > self.usable {
            return Err(Error::NeverFits { needed: need.into(), usable: self.usable.into(), unit: "blocks" });
        }
        Ok(())
    }

    /// Why the candidate may not start now; `None` when it may.
    pub fn refuse(&self, candidate: &Candidate) -> Option<Wait> {
        let held = candidate.row.and_then(|row| self.entry(row));
        if held.is_none_or(|held| !held.seated) && self.seated >= self.slots {
            Some(Wait::Slots)
        } else if candidate.prefill_in_progress {
            Some(Wait::PrefillInProgress)
        } else if candidate.batch_full {
            Some(Wait::PrefillBatchFull)
        } else if held.is_none() && candidate.need > self.usable.saturating_sub(self.promised()) {
            Some(Wait::Kv)
        } else {
            None
        }
    }

    /// Gives `row` a slot and reserves `need` blocks for it.
    pub fn hold(&mut self, row: Row, need: u32) {
        self.reserve(row, need);
        self.seat(row);
    }

    /// Reserves `need` blocks for `row`, without a slot.
    pub fn reserve(&mut self, row: Row, need: u32) {
        if self.held.len() <= row.index() {
            self.held.resize(row.index() + 1, None);
        }
        let before = self.held[row.index()].replace(Held { need, seated: false });
        assert!(before.is_none(), "a request reserves once");
        self.holders += 1;
        self.reserved += need;
    }

    /// Gives `row`, which has reserved blocks, a slot, unless it has one.
    pub fn seat(&mut self, row: Row) {
        let held = self.held[row.index()].as_mut().expect("only a holder is seated");
        self.seated += u32::from(!held.seated);
        held.seated = true;
    }

    /// Takes the slot of `row` back, if it has one; its blocks stay reserved.
    pub fn unseat(&mut self, row: Row) {
        let held = self.held[row.index()].as_mut().expect("only a holder is unseated");
        self.seated -= u32::from(held.seated);
        held.seated = false;
    }

    /// Takes back the slot and the blocks of `row`.
    pub fn release(&mut self, row: Row) {
        self.unseat(row);
        let held = self.held[row.index()].take().expect("only a holder is released");
        self.holders -= 1;
        self.reserved -= held.need;
    }

    /// Blocks reserved by `row`, if it holds any.
    pub fn held(&self, row: Row) -> Option<u32> {
        self.entry(row).map(|held| held.need)
    }

    /// Requests that hold a slot.
    pub fn seated(&self) -> u32 {
        self.seated
    }

    /// Blocks promised to those that hold some.
    pub fn reserved(&self) -> u32 {
        self.reserved
    }

    /// Blocks of the whole cache.
    pub fn usable(&self) -> u32 {
        self.usable
    }

    fn entry(&self, row: Row) -> Option<Held> {
        self.held.get(row.index()).copied().flatten()
    }

    /// Blocks that nobody who starts may count on.
    fn promised(&self) -> u32 {
        self.reserved + if self.holders > 0 { self.watermark } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Rows;

    const RULE: WorstCase = WorstCase { rule: KvAdmission::Reserve, block_size: 16, max_model_len: 128, lookahead: 0 };

    #[test]
    fn v25_the_last_token_needs_no_slot() {
        let blocks =
            [(60, 4), (61, 4), (62, 4), (64, 1), (64, 2)].map(|(prompt, outputs)| RULE.blocks(prompt, outputs));
        assert_eq!(blocks, [4, 4, 5, 4, 5]);
    }

    #[test]
    fn lookahead_is_capped_by_the_model_length() {
        let rule = WorstCase { lookahead: 40, ..RULE };
        assert_eq!((rule.blocks(60, 4), rule.blocks(120, 8), rule.blocks_for(1)), (7, 8, 3));
        let seed = WorstCase { rule: KvAdmission::MaxModelLen, ..RULE };
        assert_eq!(seed.blocks(1, 1), 8);
    }

    #[test]
    fn reasons_in_their_order() {
        let mut slab = Rows::default();
        let rows = [slab.insert(()), slab.insert(())];
        let mut ledger = Ledger::new(2, 10);
        ledger.hold(rows[0], 6);
        let all = Candidate { need: 5, prefill_in_progress: true, batch_full: true, ..Candidate::default() };
        let part = Candidate { prefill_in_progress: false, ..all };
        let kv = Candidate { batch_full: false, ..part };
        assert_eq!(ledger.refuse(&all), Some(Wait::PrefillInProgress));
        assert_eq!(ledger.refuse(&part), Some(Wait::PrefillBatchFull));
        assert_eq!(ledger.refuse(&kv), Some(Wait::Kv));
        let fits = Candidate { need: 4, batch_full: false, ..part };
        assert_eq!(ledger.refuse(&fits), None);
        ledger.hold(rows[1], 4);
        assert_eq!(ledger.refuse(&all), Some(Wait::Slots));
        ledger.release(rows[0]);
        assert_eq!((ledger.seated(), ledger.reserved(), ledger.held(rows[0])), (1, 4, None));
        assert!(ledger.fits_ever(10).is_ok() && ledger.fits_ever(11).is_err());
    }

    #[test]
    fn who_holds_blocks_without_a_slot_needs_no_more_of_them() {
        let mut slab = Rows::default();
        let rows = [slab.insert(()), slab.insert(())];
        let mut ledger = Ledger::new(1, 10).with_watermark(2);
        let ask = |ledger: &Ledger, need, row| ledger.refuse(&Candidate { need, row, ..Candidate::default() });
        assert_eq!((ask(&ledger, 10, None), ask(&ledger, 11, None)), (None, Some(Wait::Kv)));
        ledger.reserve(rows[0], 6);
        assert_eq!((ask(&ledger, 2, None), ask(&ledger, 3, None)), (None, Some(Wait::Kv)));
        assert_eq!(ask(&ledger, 6, Some(rows[0])), None);
        ledger.hold(rows[1], 2);
        assert_eq!(ask(&ledger, 6, Some(rows[0])), Some(Wait::Slots));
        assert_eq!(ask(&ledger, 2, Some(rows[1])), None);
        ledger.unseat(rows[1]);
        ledger.seat(rows[0]);
        assert_eq!((ledger.seated(), ledger.reserved()), (1, 8));
        ledger.release(rows[0]);
        ledger.release(rows[1]);
        assert_eq!((ledger.seated(), ledger.reserved()), (0, 0));
    }
}
