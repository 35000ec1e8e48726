//! The decisions for an engine whose own scheduler keeps the queues and the KV blocks (vLLM's).
//!
//! It composes the same decision objects as [`crate::exclusive`] does ([`Ledger`], [`Phase`], [`Chunker`],
//! [`Buckets`]), but owns neither a queue nor a block: it is told who holds a slot and blocks, and answers.

use super::chunk::{Chunker, Pack};
use super::ledger::{Candidate, Ledger, Wait, WorstCase};
use super::phase::{Decision, Kind, Phase, PhaseInputs};
use super::step::check_step;
use crate::config::{Buckets, Config, KvAdmission};
use crate::error::Error;
use crate::request::{Row, Rows, outputs_max};

/// How many blocks the layers of one KV cache group hold of one request.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks beyond those that hold the tokens.
    pub extra: u32,
    /// Most blocks that it ever holds: a sliding window lets older ones go, a recurrent state has a fixed number.
    pub blocks_max: Option<u32>,
}

impl Group {
    fn blocks(&self, tokens: u32) -> u64 {
        let blocks = u64::from(tokens.div_ceil(self.block_size)) + u64::from(self.extra);
        self.blocks_max.map_or(blocks, |most| blocks.min(most.into()))
    }
}

/// What the engine adds to a [`Config`].
#[derive(Clone, Debug)]
pub struct Rules {
    /// Most requests that hold a slot at once, where that is fewer than the configuration says.
    pub slots_max: u32,
    /// The KV cache groups; all take their blocks from one pool.
    pub groups: Vec<Group>,
    /// Blocks kept free when a request starts while others hold some.
    pub watermark: u32,
    /// Whether the cap on long prompts is never below an even share of the step's tokens.
    pub adaptive_threshold: bool,
    /// Most tokens of a decode row: one, and those drafted.
    pub decode_width: u32,
}

/// The head of the queue, as admission is asked about it.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Blocks that it needs at worst.
    pub need: u32,
    /// Its handle, where it holds blocks already.
    pub row: Option<Row>,
    /// Tokens that are to be computed, hits in the prefix cache not deducted.
    pub rest: u32,
    /// Requests that run or wait, itself included.
    pub requests: usize,
    /// Whether a prompt is part done.
    pub prefill_in_progress: bool,
}

/// How far a running request is, as the engine counts.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Tokens computed, those of steps in flight included.
    pub computed: i64,
    /// Tokens known.
    pub tokens: i64,
    /// Tokens drafted for the next step.
    pub drafts: i64,
    /// Outputs of steps in flight, drafts included.
    pub placeholders: i64,
    /// Tokens of the prompt.
    pub prompt: i64,
    /// Most outputs.
    pub max_tokens: i64,
    /// The first step in which the engine would run it again.
    pub eligible_step: i64,
}

impl Progress {
    /// Whether the engine would give it an output token in step `step`. A prompt that is part done is not asked
    /// here, nor one that is computed again with its outputs. With an output in flight it gets one only while that
    /// output is not sure to be the last, and never beyond the model's length.
    pub fn decodes(&self, step: i64, max_model_len: u32) -> bool {
        let prompt_left = self.computed < self.prompt.max(self.tokens - 1);
        let sure = self.computed + 2 - self.placeholders;
        if prompt_left || (self.placeholders > 0 && sure >= self.prompt + self.max_tokens) {
            return false;
        }
        let known = self.tokens + self.drafts + self.placeholders;
        self.eligible_step <= step && known > self.computed && self.computed + 1 < i64::from(max_model_len)
    }
}

/// The decisions, and who holds what.
#[derive(Clone, Debug)]
pub struct Gate {
    worst_case: WorstCase,
    groups: Vec<Group>,
    decode_width: u32,
    prefills_max: u32,
    token_buckets: Buckets,
    seqs_buckets: Buckets,
    ledger: Ledger,
    phase: Phase,
    chunker: Chunker,
    rows: Rows<()>,
    pack: Pack,
    /// The choice for the step that is being planned.
    decision: Option<Decision>,
}

impl Gate {
    /// The decisions for `config`. Refused where requests are admitted as if each grew to `max_model_len` and
    /// not even one of those fits the cache.
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
            rows: Rows::default(),
            pack: Pack::new(config.max_prefills_per_batch),
            decision: None,
        };
        let longest = gate.longest();
        if config.kv_admission == KvAdmission::MaxModelLen && gate.ledger.fits_ever(longest).is_err() {
            let expected = format!(
                "one whose {longest} KV blocks fit the {} usable ones, with kv_admission 'max_model_len'",
                config.num_blocks
            );
            return Err(Error::invalid("max_model_len", config.max_model_len, expected));
        }
        Ok(gate)
    }

    /// Blocks that a request needs at worst; an error when it can never run. A `session` may be continued
    /// with further prompts, so it may come to the longest sequence.
    pub fn need(&self, prompt: u64, max_tokens: u64, session: bool) -> Result<u32, Error> {
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
        let need = self.blocks(tokens);
        self.ledger.fits_ever(need)?;
        Ok(need)
    }

    fn blocks(&self, tokens: u32) -> u32 {
        let blocks = self.groups.iter().map(|group| group.blocks(tokens)).sum::<u64>();
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// Reserves `need` blocks, and a slot, for a request that is to start.
    pub fn enter(&mut self, need: u32) -> Row {
        let row = self.rows.insert(());
        self.ledger.hold(row, need);
        row
    }

    /// Gives a holder of blocks a slot, unless it has one; `false` for a stale handle.
    pub fn seat(&mut self, row: Row) -> bool {
        self.of(row, Ledger::seat)
    }

    /// Takes the slot back and leaves the blocks; `false` for a stale handle.
    pub fn unseat(&mut self, row: Row) -> bool {
        self.of(row, Ledger::unseat)
    }

    /// Takes back all that is held; `false` for a stale handle.
    pub fn leave(&mut self, row: Row) -> bool {
        let held = self.of(row, Ledger::release);
        self.rows.remove(row);
        held
    }

    fn of(&mut self, row: Row, change: impl Fn(&mut Ledger, Row)) -> bool {
        let held = self.rows.get(row).is_some();
        if held {
            change(&mut self.ledger, row);
        }
        held
    }

    /// Starts to choose the prompts of a step.
    pub fn begin(&mut self) {
        self.pack = Pack::new(self.prefills_max);
    }

    /// Why the head may not start now; `None` when it may.
    pub fn refuse(&self, head: &Head) -> Option<Wait> {
        let batch_full = !self.pack.fits(&self.chunker, head.rest, head.requests);
        let row = head.row.filter(|&row| self.rows.get(row).is_some());
        let Head { need, prefill_in_progress, .. } = *head;
        self.ledger.refuse(&Candidate { need, row, prefill_in_progress, batch_full })
    }

    /// Counts a prompt among those of the step; `false` when it does not fit beside the others.
    pub fn pack(&mut self, rest: u32, requests: usize) -> bool {
        self.pack.add(&self.chunker, rest, requests)
    }

    /// Lets a prompt go that was counted but is not in the step after all.
    pub fn unpack(&mut self, rest: u32) {
        self.pack.remove(rest);
    }

    /// Most tokens of the step: those of the next chunk where one prompt runs alone and is cut, else of the
    /// largest bucket.
    pub fn budget(&mut self, rest: u32, requests: usize) -> u32 {
        let whole = self.token_buckets.last();
        if self.pack.prompts() > 1 {
            return whole;
        }
        let chunk = self.chunker.chunk(rest, requests);
        if chunk < rest { chunk } else { whole }
    }

    /// Chooses what the step does.
    pub fn decide(&mut self, inputs: PhaseInputs) -> Decision {
        *self.decision.insert(self.phase.decide(inputs))
    }

    /// Whether a prompt that may start would wait for decode steps that are owed.
    pub fn interleaves(&self, decode_ready: bool) -> bool {
        let inputs = PhaseInputs { prefill_wanted: true, decode_ready, throttle_prefills: false };
        self.phase.decide(inputs).interleaved
    }

    /// Counts the step that was chosen and is sure to run. A prefill that could not be placed may have become
    /// a decode step.
    pub fn ran(&mut self, kind: Kind) {
        let Some(chosen) = self.decision.take() else { return };
        let decision = if chosen.kind == kind {
            chosen
        } else {
            let decode = kind == Kind::Decode;
            self.phase.decide(PhaseInputs { prefill_wanted: !decode, decode_ready: decode, throttle_prefills: false })
        };
        self.phase = self.phase.completed(decision);
    }

    /// Checks a prefill step; answers its padded counts and the compiled size. `rows`: whether each has prompt
    /// tokens left, and its count. The last row carries the padding.
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

    /// Checks a decode step and answers the compiled number of rows.
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

    /// Who holds what.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Blocks of the longest sequence.
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

    const FULL: Group = Group { block_size: 16, extra: 0, blocks_max: None };

    fn rules(groups: &[Group]) -> Rules {
        let groups = groups.to_vec();
        Rules { slots_max: 8, groups, watermark: 0, adaptive_threshold: false, decode_width: 1 }
    }

    fn gate(config: &Config, groups: &[Group]) -> Gate {
        Gate::new(config, rules(groups)).unwrap()
    }

    #[test]
    fn every_group_has_its_own_rule() {
        let window = Group { block_size: 16, extra: 1, blocks_max: Some(4) };
        let state = Group { block_size: 1, extra: 2, blocks_max: Some(2) };
        let gate = gate(&config(|raw| raw.num_blocks = Some(100)), &[FULL, window, state]);
        assert_eq!(gate.need(20, 1, false), Ok(2 + 3 + 2));
        assert_eq!(gate.need(100, 10, false), Ok(7 + 4 + 2));
        assert_eq!(gate.need(1, 1, true), Ok(8 + 4 + 2));
    }

    #[test]
    fn what_can_never_run_is_refused_with_numbers() {
        let gate = gate(&config(|raw| raw.num_blocks = Some(4)), &[FULL]);
        let text = |prompt, max_tokens| gate.need(prompt, max_tokens, false).unwrap_err().to_string();
        assert_eq!(text(0, 3), "prompt: 0 tokens: expected at least 1");
        assert_eq!(text(129, 1), "prompt: 129 tokens: expected at most max_model_len = 128");
        assert_eq!(text(70, 4), "kv: 5 blocks at worst: expected at most the 4 blocks of the whole cache");
        assert_eq!(text(1, 0), "max_tokens: 0: expected a whole number from 1");
    }

    #[test]
    fn the_longest_sequence_must_fit_where_it_is_what_counts() {
        let config = config(|raw| raw.kv_admission = Some("max_model_len".into()));
        let error = Gate::new(&config, rules(&[FULL, FULL])).unwrap_err().to_string();
        assert!(error.starts_with("max_model_len: 128: expected one whose 16 KV blocks fit the 10"), "{error}");
    }

    #[test]
    fn a_stale_handle_changes_nothing() {
        let mut gate = gate(&config(|_| {}), &[FULL]);
        let row = gate.enter(3);
        assert!(gate.leave(row) && !gate.leave(row) && !gate.seat(row) && !gate.unseat(row));
        let other = gate.enter(4);
        assert!(!gate.leave(row));
        assert_eq!((gate.ledger().seated(), gate.ledger().reserved()), (1, 4));
        assert!(gate.leave(Row::from_bits(other.to_bits())));
    }

    #[test]
    fn a_cut_prompt_runs_alone_with_its_chunk() {
        let mut gate = gate(&config(|raw| raw.max_prefills_per_batch = Some(2)), &[FULL]);
        gate.begin();
        assert!(gate.pack(100, 2));
        let head = Head { need: 1, row: None, rest: 1, requests: 2, prefill_in_progress: false };
        assert_eq!((gate.budget(100, 2), gate.refuse(&head)), (64, Some(Wait::PrefillBatchFull)));
        gate.unpack(100);
        assert!(gate.pack(40, 2) && gate.pack(24, 2));
        assert_eq!(gate.budget(40, 2), 64);
    }

    #[test]
    fn a_prefill_that_became_a_decode_counts_as_decode() {
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
    fn v14_ready_as_long_as_the_output_in_flight_is_not_the_last() {
        let start = Progress {
            computed: 10,
            tokens: 11,
            drafts: 0,
            placeholders: 0,
            prompt: 10,
            max_tokens: 3,
            eligible_step: 0,
        };
        let at = |computed, tokens, placeholders| Progress { computed, tokens, placeholders, ..start }.decodes(1, 100);
        assert!(at(10, 11, 0) && at(10, 10, 1) && at(11, 11, 1));
        assert!(!at(12, 12, 1), "two outputs are known, the third is in flight");
        assert!(!at(11, 11, 0), "all known tokens are computed");
        assert!(!at(9, 10, 0) && !at(10, 12, 0), "a prompt is left, or outputs that are computed again");
        assert!(!Progress { eligible_step: 2, ..start }.decodes(1, 100));
        assert!(Progress { tokens: 10, drafts: 1, ..start }.decodes(1, 100));
        let end = Progress { computed: 99, tokens: 100, max_tokens: 200, ..start };
        assert!(!end.decodes(1, 100) && end.decodes(1, 101));
    }

    #[test]
    fn violations_are_found_whatever_the_size() {
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
