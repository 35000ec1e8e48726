//! The decisions for an engine with its own queues and KV blocks (vLLM).
//!
//! [`Gate`] composes the same decision objects as [`crate::exclusive`]: [`Ledger`], [`Phase`], [`Chunker`] and
//! [`Buckets`]. It owns neither a queue nor a block. The engine reports which requests it admits and releases, and asks
//! for each decision.

use super::chunk::{Chunker, Pack};
use super::kv_group::KvGroup;
use super::ledger::{Candidate, Ledger, Wait, WorstCase};
use super::phase::{Decision, Kind, Phase, PhaseInputs};
use super::step::check_step;
use crate::config::{Buckets, Config, KvAdmission};
use crate::error::Error;
use crate::request::{Row, Slab, outputs_max};

/// Settings of the engine that are not in a [`Config`].
#[derive(Clone, Debug)]
pub struct Rules {
    /// Most requests with a batch slot at once. The bound of the configuration counts too if it is lower.
    pub slots_max: u32,
    /// The KV cache groups, all of which allocate from one block pool.
    pub groups: Vec<KvGroup>,
    /// KV blocks that stay free when a request is admitted while others have reservations.
    pub watermark: u32,
    /// Whether the long-prefill threshold is never below an even share of the step's tokens.
    pub adaptive_threshold: bool,
    /// Most tokens of a decode row: one, plus the drafts.
    pub decode_width: u32,
}

/// The head of the queue, as input of [`Gate::refuse`].
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Worst-case KV blocks of the request.
    pub needed_blocks: u32,
    /// Handle of the request, if it has a reservation already.
    pub row: Option<Row>,
    /// Prompt tokens to compute, prefix-cache hits not deducted.
    pub rest: u32,
    /// Number of running and waiting requests, including this one.
    pub num_requests: usize,
    /// Whether a running request is prefilling.
    pub prefill_in_progress: bool,
}

/// The decisions, with the reservations and batch slots that they depend on.
#[derive(Clone, Debug)]
pub struct Gate {
    worst_case: WorstCase,
    groups: Vec<KvGroup>,
    decode_width: u32,
    prefills_max: u32,
    token_buckets: Buckets,
    seqs_buckets: Buckets,
    ledger: Ledger,
    phase: Phase,
    chunker: Chunker,
    rows: Slab<()>,
    pack: Pack,
    /// Decision for the step that is being planned.
    decision: Option<Decision>,
}

impl Gate {
    /// Return a gate without requests. Returns [`Error::Invalid`] if `kv_admission` is `max_model_len` and a sequence
    /// of that length does not fit the KV cache.
    pub fn new(config: &Config, rules: Rules) -> Result<Self, Error> {
        let Rules { slots_max, groups, watermark, adaptive_threshold, decode_width } = rules;
        let mut chunker = Chunker::new(config);
        if adaptive_threshold {
            chunker = chunker.with_share_of(config.max_num_batched_tokens);
        }
        let gate = Self {
            worst_case: WorstCase {
                rule: config.kv_admission,
                block_size: config.block_size,
                max_model_len: config.max_model_len,
                lookahead: config.lookahead,
            },
            groups,
            decode_width,
            prefills_max: config.max_prefills_per_batch,
            token_buckets: config.num_batched_tokens_buckets.clone(),
            seqs_buckets: config.num_seqs_buckets.clone(),
            ledger: Ledger::new(config.max_num_seqs.min(slots_max), config.num_blocks).with_watermark(watermark),
            phase: Phase::new(config),
            chunker,
            rows: Slab::default(),
            pack: Pack::new(config.max_prefills_per_batch),
            decision: None,
        };
        let longest = gate.longest();
        if config.kv_admission == KvAdmission::MaxModelLen && gate.ledger.fits_ever(longest).is_err() {
            let expected = format!(
                "a length that needs at most {} KV blocks, not {longest}, with kv_admission 'max_model_len'",
                config.num_blocks
            );
            return Err(Error::invalid("max_model_len", config.max_model_len, expected));
        }
        Ok(gate)
    }

    /// Return the worst-case KV blocks of a request. A `session` may continue with further prompts, so its worst case
    /// is the longest sequence.
    ///
    /// Returns [`Error::Invalid`] for an empty prompt or no output tokens, [`Error::PromptTooLong`] for a prompt longer
    /// than `max_model_len`, and [`Error::NeverFits`] for a worst case larger than the whole KV cache.
    pub fn needed_blocks(&self, prompt: u64, max_tokens: u64, session: bool) -> Result<u32, Error> {
        let max_model_len = self.worst_case.max_model_len;
        if prompt == 0 {
            return Err(Error::invalid("prompt", "0 tokens", "at least 1"));
        }
        if prompt > max_model_len.into() {
            return Err(Error::PromptTooLong { prompt, max_model_len: max_model_len.into() });
        }
        if max_tokens == 0 {
            return Err(Error::invalid("max_tokens", max_tokens, "a whole number from 1"));
        }
        let prompt = u32::try_from(prompt).expect("at most max_model_len");
        let max_tokens = u32::try_from(max_tokens).unwrap_or(u32::MAX);
        let outputs = outputs_max(prompt, max_tokens, max_model_len);
        let tokens = if session { max_model_len } else { self.worst_case.tokens(prompt, outputs) };
        let needed_blocks = self.blocks(tokens);
        self.ledger.fits_ever(needed_blocks)?;
        Ok(needed_blocks)
    }

    fn blocks(&self, tokens: u32) -> u32 {
        let blocks = self.groups.iter().map(|group| group.blocks(tokens)).sum::<u64>();
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// Reserve `needed_blocks` KV blocks and a batch slot for a request, and return its handle.
    pub fn admit(&mut self, needed_blocks: u32) -> Row {
        let row = self.rows.insert(());
        self.ledger.admit(row, needed_blocks);
        row
    }

    /// Give a request a batch slot, unless it has one. Returns `false` for a stale handle.
    pub fn take_slot(&mut self, row: Row) -> bool {
        self.change(row, Ledger::take_slot)
    }

    /// Free the batch slot of a request and keep its reservation. Returns `false` for a stale handle.
    pub fn free_slot(&mut self, row: Row) -> bool {
        self.change(row, Ledger::free_slot)
    }

    /// Release the reservation and the batch slot of a request. Returns `false` for a stale handle.
    pub fn release(&mut self, row: Row) -> bool {
        let known = self.change(row, Ledger::release);
        self.rows.remove(row);
        known
    }

    fn change(&mut self, row: Row, change: impl Fn(&mut Ledger, Row)) -> bool {
        let known = self.rows.get(row).is_some();
        if known {
            change(&mut self.ledger, row);
        }
        known
    }

    /// Start to select the prompts of a step.
    pub fn begin(&mut self) {
        self.pack = Pack::new(self.prefills_max);
    }

    /// Return why the head is not admitted now, or `None` if it fits.
    pub fn refuse(&self, head: &Head) -> Option<Wait> {
        let batch_full = !self.pack.fits(&self.chunker, head.rest, head.num_requests);
        let row = head.row.filter(|&row| self.rows.get(row).is_some());
        let Head { needed_blocks, prefill_in_progress, .. } = *head;
        self.ledger.refuse(&Candidate { needed_blocks, row, prefill_in_progress, batch_full })
    }

    /// Add a prompt with `rest` tokens to compute to the step. Returns `false` if the step's token or row capacity is
    /// exhausted.
    pub fn pack(&mut self, rest: u32, num_requests: usize) -> bool {
        self.pack.add(&self.chunker, rest, num_requests)
    }

    /// Remove a prompt that was added by [`Gate::pack`] and that the engine did not schedule.
    pub fn unpack(&mut self, rest: u32) {
        self.pack.remove(rest);
    }

    /// Return the token budget of a step that starts with a prompt of `rest` tokens to compute: the next chunk if the
    /// prompt is the only one and does not fit in full, the largest token bucket otherwise.
    pub fn budget(&mut self, rest: u32, num_requests: usize) -> u32 {
        let largest = self.token_buckets.last();
        if self.pack.prompts() > 1 {
            return largest;
        }
        let chunk = self.chunker.chunk(rest, num_requests);
        if chunk < rest { chunk } else { largest }
    }

    /// Decide whether the step prefills or decodes.
    pub fn decide(&mut self, inputs: PhaseInputs) -> Decision {
        *self.decision.insert(self.phase.decide(inputs))
    }

    /// Whether a head that fits would wait for decode steps that are due under the interleave bound.
    pub fn interleaves(&self, decode_ready: bool) -> bool {
        let inputs = PhaseInputs { prefill_wanted: true, decode_ready, throttle_prefills: false };
        self.phase.decide(inputs).interleaved
    }

    /// Record that the step of the last [`Gate::decide`] runs as `kind`. A decided prefill may run as a decode if the
    /// engine could not schedule its prompts.
    pub fn ran(&mut self, kind: Kind) {
        let Some(decided) = self.decision.take() else { return };
        let decision = if decided.kind == kind {
            decided
        } else {
            let decode = kind == Kind::Decode;
            self.phase.decide(PhaseInputs { prefill_wanted: !decode, decode_ready: decode, throttle_prefills: false })
        };
        self.phase = self.phase.completed(decision);
    }

    /// Check a prefill step, and return the padded token count of each row and the token bucket.
    ///
    /// `rows` has for each row whether it is prefilling, and its unpadded count. The last row carries the padding.
    /// Returns [`Error::BadStep`] with the request's `name` if no compiled graph can run the step.
    pub fn pad_prefill<N: std::fmt::Display>(
        &self,
        rows: &[(bool, i64)],
        name: impl Fn(usize) -> N,
    ) -> Result<(Vec<i64>, u32), Error> {
        let total = rows.iter().map(|&(_, count)| count.max(0)).sum::<i64>();
        let last = self.token_buckets.last();
        let bucket = u32::try_from(total).map_or(last, |total| self.token_buckets.fit(total).unwrap_or(last));
        check_step(Kind::Prefill, bucket, i64::from(self.decode_width), rows.iter().copied(), name)?;
        let mut padded: Vec<i64> = rows.iter().map(|&(_, count)| count).collect();
        if let Some(last) = padded.last_mut() {
            *last += i64::from(bucket) - total;
        }
        Ok((padded, bucket))
    }

    /// Check a decode step, and return the batch bucket. Arguments and errors are those of [`Gate::pad_prefill`].
    pub fn pad_decode<N: std::fmt::Display>(
        &self,
        rows: impl Iterator<Item = (bool, i64)> + Clone,
        name: impl Fn(usize) -> N,
    ) -> Result<u32, Error> {
        let count = u32::try_from(rows.clone().count()).unwrap_or(u32::MAX);
        let padded = self.seqs_buckets.fit(count).unwrap_or(self.seqs_buckets.last());
        check_step(Kind::Decode, padded, i64::from(self.decode_width), rows, name)?;
        Ok(padded)
    }

    /// The reservations and batch slots.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// KV blocks of a sequence of `max_model_len` tokens.
    pub fn longest(&self) -> u32 {
        self.blocks(self.worst_case.max_model_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RawConfig;

    fn config(change: impl FnOnce(&mut RawConfig)) -> Config {
        let mut raw = RawConfig {
            max_num_seqs: Some(2),
            max_num_batched_tokens: Some(64),
            max_model_len: Some(128),
            block_size: Some(16),
            num_blocks: Some(10),
            ..RawConfig::default()
        };
        change(&mut raw);
        Config::resolve(&raw).unwrap()
    }

    const FULL: KvGroup = KvGroup { block_size: 16, extra: 0, blocks_max: None };

    fn rules(groups: &[KvGroup]) -> Rules {
        let groups = groups.to_vec();
        Rules { slots_max: 8, groups, watermark: 0, adaptive_threshold: false, decode_width: 1 }
    }

    fn gate(config: &Config, groups: &[KvGroup]) -> Gate {
        Gate::new(config, rules(groups)).unwrap()
    }

    #[test]
    fn the_worst_case_is_the_sum_over_the_groups() {
        let window = KvGroup { block_size: 16, extra: 1, blocks_max: Some(4) };
        let state = KvGroup { block_size: 1, extra: 2, blocks_max: Some(2) };
        let gate = gate(&config(|raw| raw.num_blocks = Some(100)), &[FULL, window, state]);
        assert_eq!(gate.needed_blocks(20, 1, false), Ok(2 + 3 + 2));
        assert_eq!(gate.needed_blocks(100, 10, false), Ok(7 + 4 + 2));
        assert_eq!(gate.needed_blocks(1, 1, true), Ok(8 + 4 + 2));
    }

    #[test]
    fn a_request_that_can_never_be_admitted_is_refused_with_counts() {
        let gate = gate(&config(|raw| raw.num_blocks = Some(4)), &[FULL]);
        let text = |prompt, max_tokens| gate.needed_blocks(prompt, max_tokens, false).unwrap_err().to_string();
        assert_eq!(text(0, 3), "prompt: 0 tokens: expected at least 1");
        assert_eq!(text(129, 1), "prompt: 129 tokens: expected at most max_model_len = 128");
        assert_eq!(text(70, 4), "kv: 5 blocks in the worst case: expected at most 4 blocks, the whole KV cache");
        assert_eq!(text(1, 0), "max_tokens: 0: expected a whole number from 1");
    }

    #[test]
    fn a_cache_smaller_than_max_model_len_is_refused_with_that_admission_rule() {
        let config = config(|raw| raw.kv_admission = Some("max_model_len".into()));
        let error = Gate::new(&config, rules(&[FULL, FULL])).unwrap_err().to_string();
        assert!(
            error.starts_with("max_model_len: 128: expected a length that needs at most 10 KV blocks, not 16"),
            "{error}"
        );
    }

    #[test]
    fn a_stale_handle_changes_nothing() {
        let mut gate = gate(&config(|_| {}), &[FULL]);
        let row = gate.admit(3);
        assert!(gate.release(row) && !gate.release(row) && !gate.take_slot(row) && !gate.free_slot(row));
        let other = gate.admit(4);
        assert!(!gate.release(row));
        assert_eq!((gate.ledger().slots_used(), gate.ledger().reserved()), (1, 4));
        assert!(gate.release(Row::from_bits(other.to_bits())));
    }

    #[test]
    fn a_prompt_that_is_split_runs_alone_with_its_chunk() {
        let mut gate = gate(&config(|raw| raw.max_prefills_per_batch = Some(2)), &[FULL]);
        gate.begin();
        assert!(gate.pack(100, 2));
        let head = Head { needed_blocks: 1, row: None, rest: 1, num_requests: 2, prefill_in_progress: false };
        assert_eq!((gate.budget(100, 2), gate.refuse(&head)), (64, Some(Wait::PrefillBatchFull)));
        gate.unpack(100);
        assert!(gate.pack(40, 2) && gate.pack(24, 2));
        assert_eq!(gate.budget(40, 2), 64);
    }

    #[test]
    fn a_decided_prefill_that_runs_as_a_decode_counts_as_a_decode() {
        let mut gate = gate(&config(|raw| raw.max_consecutive_prefill_steps = Some(1)), &[FULL]);
        let inputs = PhaseInputs { prefill_wanted: true, decode_ready: true, throttle_prefills: false };
        assert_eq!(gate.decide(inputs).kind, Kind::Prefill);
        gate.ran(Kind::Decode);
        assert!(!gate.interleaves(true));
        assert_eq!(gate.decide(inputs).kind, Kind::Prefill);
        gate.ran(Kind::Prefill);
        assert!(gate.interleaves(true) && !gate.interleaves(false));
    }

    #[test]
    fn bad_steps_are_refused_at_every_size() {
        let gate = gate(&config(|_| {}), &[FULL]);
        let rows = |rows: &'static [(bool, i64)]| rows.iter().copied();
        let name = |at: usize| ["a", "b", "c"][at];
        assert_eq!(gate.pad_prefill(&[(true, 20), (true, 4)], name), Ok((vec![20, 44], 64)));
        assert_eq!(gate.pad_decode(rows(&[(false, 1)]), name), Ok(1));
        assert!(gate.pad_prefill(&[(true, 60), (false, 1)], name).is_err());
        assert!(gate.pad_prefill(&[(true, 65)], name).is_err());
        assert!(gate.pad_decode(rows(&[(false, 1), (false, 1), (false, 1)]), name).is_err());
        assert!(gate.pad_decode(rows(&[(false, 2)]), name).is_err());
    }
}
