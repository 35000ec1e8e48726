//! Conversion of a [`RawConfig`] to a checked [`Config`].

use super::check::Check;
use super::fields::{Config, FIELDS, Partial, RawConfig};
use super::rules;
use crate::error::Error;

impl Config {
    /// Check every field and fill in the defaults. The error lists every fault, in the order of the declaration.
    pub fn resolve(raw: &RawConfig) -> Result<Self, Error> {
        let mut check = Check::new(raw.faults.clone());
        let mut partial = Partial::new(raw, &mut check);
        rules::apply(raw, &mut partial, &mut check);
        check.finish(|fault| FIELDS.iter().position(|field| field.name == fault.field))?;
        Ok(partial.complete().expect("a field without a value has a fault"))
    }

    /// Maximum number of prompt tokens in one step: the last token bucket.
    pub fn prefill_budget(&self) -> u32 {
        self.num_batched_tokens_buckets.last()
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
        assert_eq!(fields, ["max_num_seqs", "max_num_batched_tokens", "num_blocks", "policy", "dcp"]);
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
