//! Configuration of the exclusive scheduler: defaults, rules, and every fault at once.

use crate::bucket::Buckets;
use crate::error::{Error, Fault};
use crate::queue::Policy;

pub use crate::request::TOKENS_MAX;

/// The smallest default token bucket.
const FIRST_TOKEN_BUCKET: u32 = 128;

/// The chunk planner keeps a table over prompt lengths, in units of the buckets' common divisor.
const CHUNK_TABLE_MAX: u32 = 1 << 22;

/// How the KV cache is promised to requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvAdmission {
    /// Each request reserves its own worst case.
    #[default]
    Reserve,
    /// Each request counts as a sequence of the longest length.
    MaxModelLen,
}

impl KvAdmission {
    /// The rule of that name, as configurations spell it.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "reserve" => Some(Self::Reserve),
            "max_model_len" => Some(Self::MaxModelLen),
            _ => None,
        }
    }

    /// The name that configurations use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::MaxModelLen => "max_model_len",
        }
    }
}

/// How a long prompt is cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Chunking {
    /// As much as the budget takes.
    #[default]
    Fixed,
    /// Where the cost table says that ending on a bucket edge is cheaper.
    Bucket,
}

impl Chunking {
    /// The rule of that name, as configurations spell it.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "fixed" => Some(Self::Fixed),
            "bucket" => Some(Self::Bucket),
            _ => None,
        }
    }

    /// The name that configurations use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Bucket => "bucket",
        }
    }
}

/// A configuration as given: absent fields are `None`, nothing is checked.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "the fields are those of `Config`")]
pub struct RawConfig {
    pub max_num_seqs: Option<i64>,
    pub max_num_batched_tokens: Option<i64>,
    pub max_model_len: Option<i64>,
    pub block_size: Option<i64>,
    pub num_blocks: Option<i64>,
    pub num_batched_tokens_buckets: Option<Vec<i64>>,
    pub num_seqs_buckets: Option<Vec<i64>>,
    pub decode_context_length_buckets: Option<Vec<i64>>,
    pub kv_segment_size_buckets: Option<Vec<i64>>,
    pub max_prefills_per_batch: Option<i64>,
    pub kv_admission: Option<String>,
    pub max_consecutive_prefill_steps: Option<i64>,
    pub min_decode_steps: Option<i64>,
    pub chunking: Option<String>,
    pub prefill_cost: Option<Vec<(i64, f64)>>,
    pub long_prefill_token_threshold: Option<i64>,
    pub prefix_caching: Option<bool>,
    pub policy: Option<String>,
    pub lookahead: Option<i64>,
    pub dcp: Option<i64>,
    /// What the caller found wrong while reading the fields (a wrong type); reported together with the rest.
    pub faults: Vec<Fault>,
}

/// A checked configuration, every default filled in. All counts are of tokens, requests or blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Most requests that hold a slot at once.
    pub max_num_seqs: u32,
    /// Most tokens of one step.
    pub max_num_batched_tokens: u32,
    /// Longest sequence, prompt and outputs together.
    pub max_model_len: u32,
    /// Tokens of one KV block.
    pub block_size: u32,
    /// Usable KV blocks.
    pub num_blocks: u32,
    /// Compiled prefill sizes.
    pub num_batched_tokens_buckets: Buckets,
    /// Compiled decode batch sizes.
    pub num_seqs_buckets: Buckets,
    /// Compiled decode context lengths.
    pub decode_context_length_buckets: Buckets,
    /// Segment sizes of segmented prefill, where the platform has it.
    pub kv_segment_size_buckets: Option<Buckets>,
    /// Most prompts that start in one step.
    pub max_prefills_per_batch: u32,
    /// How the KV cache is promised.
    pub kv_admission: KvAdmission,
    /// Most prefill steps in a row while a decode is ready; `None`: prefill first, without bound.
    pub max_consecutive_prefill_steps: Option<u32>,
    /// Decode steps owed once that bound is hit.
    pub min_decode_steps: u32,
    /// How a long prompt is cut.
    pub chunking: Chunking,
    /// Cost of a prefill of each padded size, any unit, ascending by size.
    pub prefill_cost: Option<Vec<(u32, f64)>>,
    /// Cap on a chunk while others are there; 0 is off.
    pub long_prefill_token_threshold: u32,
    /// Whether full blocks are shared by content.
    pub prefix_caching: bool,
    /// Order of the waiting queue.
    pub policy: Policy,
    /// Tokens beyond the next one for which KV slots are kept.
    pub lookahead: u32,
    /// Decode context parallel size.
    pub dcp: u32,
}

impl Config {
    /// Checks every field and fills in the defaults; an error lists every fault that was found.
    pub fn resolve(raw: &RawConfig) -> Result<Self, Error> {
        let mut check = Check { faults: raw.faults.clone() };
        let max_num_seqs = check.required("max_num_seqs", raw.max_num_seqs);
        let max_num_batched_tokens = check.required("max_num_batched_tokens", raw.max_num_batched_tokens);
        let max_model_len = check.required("max_model_len", raw.max_model_len);
        let block_size = check.required("block_size", raw.block_size);
        let num_blocks = check.required("num_blocks", raw.num_blocks);
        let dcp = check.count("dcp", raw.dcp, 1, 1);
        if let (Some(tokens), Some(seqs)) = (max_num_batched_tokens, max_num_seqs)
            && tokens < seqs
        {
            check.fault("max_num_batched_tokens", tokens, format!("at least max_num_seqs = {seqs}"));
        }
        let budget = max_num_batched_tokens.zip(max_model_len).map(|(tokens, len)| tokens.min(len));
        let segments = check.buckets("kv_segment_size_buckets", raw.kv_segment_size_buckets.as_deref(), None);
        let token_buckets = check.token_buckets(raw, budget, dcp.zip(block_size));
        let seqs_buckets = check
            .buckets("num_seqs_buckets", raw.num_seqs_buckets.as_deref(), max_num_seqs)
            .or_else(|| max_num_seqs.map(|n| Buckets::doubling(1, n)));
        if let Some(last) = max_num_seqs {
            check.tell_last("num_seqs_buckets", last);
        }
        let context_buckets = check.context_buckets(raw.decode_context_length_buckets.as_deref(), max_model_len);
        let kv_admission = check.name(
            "kv_admission",
            raw.kv_admission.as_deref(),
            KvAdmission::from_name,
            "'reserve' or 'max_model_len'",
        );
        // With context parallelism a block holds more; then whoever knows how much checks.
        if let (KvAdmission::MaxModelLen, Some(len), Some(size), Some(blocks), Some(1)) =
            (kv_admission, max_model_len, block_size, num_blocks, dcp)
            && len.div_ceil(size) > blocks
        {
            let usable = u64::from(size) * u64::from(blocks);
            check.fault(
                "max_model_len",
                len,
                format!("at most the {usable} usable KV tokens, with kv_admission 'max_model_len'"),
            );
        }
        let chunking = check.name("chunking", raw.chunking.as_deref(), Chunking::from_name, "'fixed' or 'bucket'");
        if let (Chunking::Bucket, Some(buckets), Some(len)) = (chunking, &token_buckets, max_model_len) {
            let unit = crate::bucket::common_divisor(buckets);
            if len.div_ceil(unit) > CHUNK_TABLE_MAX {
                let most = u64::from(CHUNK_TABLE_MAX) * u64::from(unit);
                check.fault(
                    "chunking",
                    "bucket",
                    format!("max_model_len of at most {most} with token buckets of common divisor {unit}"),
                );
            }
        }
        let prefill_cost = check.prefill_cost(raw.prefill_cost.as_deref(), token_buckets.as_ref());
        let max_prefills_per_batch = check.count("max_prefills_per_batch", raw.max_prefills_per_batch, 1, 1);
        let max_consecutive_prefill_steps =
            raw.max_consecutive_prefill_steps.and_then(|n| check.count("max_consecutive_prefill_steps", Some(n), 1, 1));
        let min_decode_steps = check.count("min_decode_steps", raw.min_decode_steps, 1, 1);
        let threshold = check.count("long_prefill_token_threshold", raw.long_prefill_token_threshold, 0, 0);
        let policy = check.name("policy", raw.policy.as_deref(), Policy::from_name, "'fcfs' or 'priority'");
        let lookahead = check.count("lookahead", raw.lookahead, 0, 0);
        if !check.faults.is_empty() {
            return Err(Error::Invalid(check.faults));
        }
        let resolved = || {
            Some(Self {
                max_num_seqs: max_num_seqs?,
                max_num_batched_tokens: max_num_batched_tokens?,
                max_model_len: max_model_len?,
                block_size: block_size?,
                num_blocks: num_blocks?,
                num_batched_tokens_buckets: token_buckets?,
                num_seqs_buckets: seqs_buckets?,
                decode_context_length_buckets: context_buckets?,
                kv_segment_size_buckets: segments,
                max_prefills_per_batch: max_prefills_per_batch?,
                kv_admission,
                max_consecutive_prefill_steps,
                min_decode_steps: min_decode_steps?,
                chunking,
                prefill_cost,
                long_prefill_token_threshold: threshold?,
                prefix_caching: raw.prefix_caching.unwrap_or(false),
                policy,
                lookahead: lookahead?,
                dcp: dcp?,
            })
        };
        Ok(resolved().expect("a missing field is a fault"))
    }

    /// Most prompt tokens of one step: the last token bucket.
    pub fn prefill_budget(&self) -> u32 {
        self.num_batched_tokens_buckets.last()
    }
}

/// Collects faults. A field that was already reported as unreadable is not reported again as missing.
struct Check {
    faults: Vec<Fault>,
}

impl Check {
    fn fault(&mut self, field: &'static str, value: impl std::fmt::Display, expected: impl Into<String>) {
        self.faults.push(Fault::new(field, value, expected));
    }

    fn required(&mut self, field: &'static str, value: Option<i64>) -> Option<u32> {
        if value.is_none() {
            if !self.faults.iter().any(|fault| fault.field == field) {
                self.fault(field, "missing", format!("a whole number from 1 to {TOKENS_MAX}"));
            }
            return None;
        }
        self.count(field, value, 1, 1)
    }

    fn count(&mut self, field: &'static str, value: Option<i64>, least: u32, default: u32) -> Option<u32> {
        let Some(value) = value else { return Some(default) };
        let count = u32::try_from(value).ok().filter(|count| (least..=TOKENS_MAX).contains(count));
        if count.is_none() {
            self.fault(field, value, format!("a whole number from {least} to {TOKENS_MAX}"));
        }
        count
    }

    fn name<T: Default>(
        &mut self,
        field: &'static str,
        value: Option<&str>,
        read: impl Fn(&str) -> Option<T>,
        expected: &str,
    ) -> T {
        let Some(name) = value else { return T::default() };
        read(name).unwrap_or_else(|| {
            self.fault(field, format!("'{name}'"), expected);
            T::default()
        })
    }

    fn buckets(&mut self, field: &'static str, sizes: Option<&[i64]>, last: Option<u32>) -> Option<Buckets> {
        match Buckets::new(field, sizes?, last) {
            Ok(buckets) => Some(buckets),
            Err(fault) => {
                self.faults.push(fault);
                None
            }
        }
    }

    /// The token buckets: as given, else the segment sizes, else doubling; under decode context
    /// parallelism only those that every rank can share evenly.
    fn token_buckets(&mut self, raw: &RawConfig, budget: Option<u32>, dcp: Option<(u32, u32)>) -> Option<Buckets> {
        let budget = budget?;
        self.tell_last("num_batched_tokens_buckets", budget);
        let given = match (&raw.num_batched_tokens_buckets, &raw.kv_segment_size_buckets) {
            (Some(sizes), _) => Some(("num_batched_tokens_buckets", sizes)),
            (None, Some(sizes)) => Some(("kv_segment_size_buckets", sizes)),
            (None, None) => None,
        };
        let (field, buckets) = match given {
            Some((field, sizes)) => {
                if self.faults.iter().any(|fault| fault.field == field) {
                    return None;
                }
                (field, self.buckets(field, Some(sizes), Some(budget))?)
            }
            None => ("num_batched_tokens_buckets", Buckets::doubling(FIRST_TOKEN_BUCKET, budget)),
        };
        let (dcp, block_size) = dcp?;
        if dcp == 1 {
            return Some(buckets);
        }
        let unit = u64::from(dcp) * u64::from(block_size);
        let even: Vec<i64> =
            buckets.sizes().iter().filter(|&&size| u64::from(size) % unit == 0).map(|&size| i64::from(size)).collect();
        if even.last() != Some(&i64::from(budget)) {
            let expected = format!("{budget} to be a multiple of dcp * block_size = {unit}");
            self.fault(field, format!("{:?}", buckets.sizes()), expected);
            return None;
        }
        self.buckets(field, Some(&even), Some(budget))
    }

    /// Where `field` could not be read as a list, says what its last size would have to be.
    fn tell_last(&mut self, field: &str, last: u32) {
        for fault in self.faults.iter_mut().filter(|fault| fault.field == field) {
            if !fault.expected.contains("end in") {
                fault.expected = format!("{}, ascending, that end in {last}", fault.expected);
            }
        }
    }

    fn context_buckets(&mut self, sizes: Option<&[i64]>, max_model_len: Option<u32>) -> Option<Buckets> {
        const FIELD: &str = "decode_context_length_buckets";
        let last = max_model_len?;
        let Some(sizes) = sizes else { return self.buckets(FIELD, Some(&[i64::from(last)]), None) };
        let buckets = self.buckets(FIELD, Some(sizes), None)?;
        if buckets.last() > last {
            self.fault(FIELD, format!("{sizes:?}"), format!("sizes of at most max_model_len = {last}"));
            return None;
        }
        let mut completed = sizes.to_vec();
        if buckets.last() < last {
            completed.push(i64::from(last));
        }
        self.buckets(FIELD, Some(&completed), None)
    }

    fn prefill_cost(&mut self, table: Option<&[(i64, f64)]>, buckets: Option<&Buckets>) -> Option<Vec<(u32, f64)>> {
        const FIELD: &str = "prefill_cost";
        let mut costs = Vec::new();
        for &(size, cost) in table? {
            match u32::try_from(size) {
                Ok(size @ 1..=TOKENS_MAX) if cost.is_finite() && (0.0..=1e9).contains(&cost) => {
                    costs.push((size, cost));
                }
                _ => {
                    self.fault(
                        FIELD,
                        format!("{size}: {cost}"),
                        "padded tokens from 1, each with a cost from 0 to 1e9",
                    );
                }
            }
        }
        if costs.len() < table?.len() {
            return None;
        }
        costs.sort_unstable_by_key(|&(size, _)| size);
        let missing: Vec<u32> = buckets?
            .sizes()
            .iter()
            .copied()
            .filter(|size| costs.binary_search_by_key(size, |&(size, _)| size).is_err())
            .collect();
        if !missing.is_empty() {
            let given: Vec<u32> = costs.iter().map(|&(size, _)| size).collect();
            self.fault(FIELD, format!("{given:?}"), format!("a cost for every token bucket; none for {missing:?}"));
        }
        Some(costs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw() -> RawConfig {
        RawConfig {
            max_num_seqs: Some(8),
            max_num_batched_tokens: Some(2048),
            max_model_len: Some(4096),
            block_size: Some(32),
            num_blocks: Some(1024),
            ..RawConfig::default()
        }
    }

    fn faults(raw: &RawConfig) -> String {
        Config::resolve(raw).unwrap_err().to_string()
    }

    #[test]
    fn defaults() {
        let config = Config::resolve(&raw()).unwrap();
        assert_eq!(config.num_batched_tokens_buckets.sizes(), [128, 256, 512, 1024, 2048]);
        assert_eq!(config.num_seqs_buckets.sizes(), [1, 2, 4, 8]);
        assert_eq!(config.decode_context_length_buckets.sizes(), [4096]);
        assert_eq!((config.max_prefills_per_batch, config.min_decode_steps, config.prefill_budget()), (1, 1, 2048));
    }

    #[test]
    fn b03_the_model_length_decides() {
        let raw = RawConfig { max_num_batched_tokens: Some(512), max_model_len: Some(317), ..raw() };
        assert_eq!(Config::resolve(&raw).unwrap().num_batched_tokens_buckets.sizes(), [128, 256, 317]);
    }

    #[test]
    fn every_fault_has_a_line() {
        let raw = RawConfig {
            max_num_seqs: Some(0),
            max_num_batched_tokens: Some(-3),
            policy: Some("lifo".into()),
            dcp: Some(1 << 40),
            num_blocks: None,
            ..raw()
        };
        let text = faults(&raw);
        let fields: Vec<&str> = text.lines().map(|line| line.split(':').next().unwrap()).collect();
        assert_eq!(fields, ["max_num_seqs", "max_num_batched_tokens", "num_blocks", "dcp", "policy"]);
    }

    #[test]
    fn v02_the_seed_rule_refuses_a_cache_below_the_model_length() {
        let raw = RawConfig {
            max_num_seqs: Some(4),
            max_num_batched_tokens: Some(128),
            max_model_len: Some(128),
            block_size: Some(16),
            num_blocks: Some(4),
            kv_admission: Some("max_model_len".into()),
            ..RawConfig::default()
        };
        assert_eq!(
            faults(&raw),
            "max_model_len: 128: expected at most the 64 usable KV tokens, with kv_admission 'max_model_len'"
        );
    }

    #[test]
    fn segments_are_the_token_buckets_unless_those_are_given() {
        let segments = RawConfig { kv_segment_size_buckets: Some(vec![512, 2048]), ..raw() };
        assert_eq!(Config::resolve(&segments).unwrap().num_batched_tokens_buckets.sizes(), [512, 2048]);
        let both = RawConfig { num_batched_tokens_buckets: Some(vec![2048]), ..segments };
        assert_eq!(Config::resolve(&both).unwrap().num_batched_tokens_buckets.sizes(), [2048]);
    }

    #[test]
    fn context_buckets_are_completed() {
        let given = |sizes: &[i64]| RawConfig { decode_context_length_buckets: Some(sizes.to_vec()), ..raw() };
        let sizes =
            |sizes: &[i64]| Config::resolve(&given(sizes)).map(|c| c.decode_context_length_buckets.sizes().to_vec());
        assert_eq!(sizes(&[1024]).unwrap(), [1024, 4096]);
        assert_eq!(sizes(&[1024, 4096]).unwrap(), [1024, 4096]);
        assert!(sizes(&[8192]).is_err());
    }

    #[test]
    fn context_parallelism_keeps_even_buckets() {
        let dcp = |n| RawConfig { dcp: Some(n), block_size: Some(64), ..raw() };
        assert_eq!(Config::resolve(&dcp(4)).unwrap().num_batched_tokens_buckets.sizes(), [256, 512, 1024, 2048]);
        assert!(faults(&dcp(3)).contains("multiple of dcp * block_size = 192"));
    }

    #[test]
    fn prefill_cost_covers_every_bucket() {
        let cost = |table: &[(i64, f64)]| RawConfig {
            num_batched_tokens_buckets: Some(vec![128, 2048]),
            prefill_cost: Some(table.to_vec()),
            ..raw()
        };
        assert!(Config::resolve(&cost(&[(2048, 5.0), (128, 1.0)])).is_ok());
        assert!(faults(&cost(&[(128, 1.0)])).contains("none for [2048]"));
        assert!(faults(&cost(&[(128, f64::NAN), (2048, 1.0)])).contains("128: NaN"));
    }
}
