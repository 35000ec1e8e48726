//! The compiled shapes of a configuration, and the choice of the shape for a step.

use crate::config::{Buckets, Config};
use crate::error::Error;

/// A compiled shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shape {
    /// Concatenated prompts.
    Prefill {
        /// Number of tokens: a token bucket.
        tokens: u32,
    },
    /// One token per row.
    Decode {
        /// Number of rows: a batch bucket.
        rows: u32,
        /// Maximum context length of a row, including the token being computed: a context bucket.
        context: u32,
    },
}

/// The compiled shapes of a configuration, and the limits that hold for all of its tensors.
#[derive(Clone, Debug)]
pub struct Layout {
    pub(super) block_size: u32,
    pub(super) num_blocks: u32,
    pub(super) max_model_len: u32,
    pub(super) prefills_max: u32,
    pub(super) vocab_size: Option<u32>,
    token_buckets: Buckets,
    seqs_buckets: Buckets,
    context_buckets: Buckets,
}

impl Layout {
    /// Return the layout of a configuration, or an error for `dcp` above 1: under decode context parallelism a KV slot
    /// belongs to one of several ranks, and `slot_mapping` has no rank.
    pub fn new(config: &Config, vocab_size: Option<u32>) -> Result<Self, Error> {
        if config.dcp > 1 {
            return Err(Error::invalid("dcp", config.dcp, "1: a slot mapping addresses the KV cache of one device"));
        }
        Ok(Self {
            block_size: config.block_size,
            num_blocks: config.num_blocks,
            max_model_len: config.max_model_len,
            prefills_max: config.max_prefills_per_batch,
            vocab_size,
            token_buckets: config.num_batched_tokens_buckets.clone(),
            seqs_buckets: config.num_seqs_buckets.clone(),
            context_buckets: config.decode_context_length_buckets.clone(),
        })
    }

    /// Return all shapes: prefills ascending, then decodes ascending by rows and context.
    pub fn shapes(&self) -> impl Iterator<Item = Shape> + '_ {
        let prefills = self.token_buckets.sizes().iter().map(|&tokens| Shape::Prefill { tokens });
        let contexts = self.context_buckets.sizes();
        let decodes = self.seqs_buckets.sizes().iter();
        prefills
            .chain(decodes.flat_map(move |&rows| contexts.iter().map(move |&context| Shape::Decode { rows, context })))
    }

    /// Return whether the shape is a compiled shape of this layout.
    pub fn contains(&self, shape: Shape) -> bool {
        let holds = |buckets: &Buckets, size: u32| buckets.sizes().binary_search(&size).is_ok();
        match shape {
            Shape::Prefill { tokens } => holds(&self.token_buckets, tokens),
            Shape::Decode { rows, context } => holds(&self.seqs_buckets, rows) && holds(&self.context_buckets, context),
        }
    }

    /// Return the token buckets, ascending.
    pub fn token_buckets(&self) -> &[u32] {
        self.token_buckets.sizes()
    }

    /// Return the batch buckets, ascending.
    pub fn seqs_buckets(&self) -> &[u32] {
        self.seqs_buckets.sizes()
    }

    /// Return the smallest shape that holds `tokens` prompt tokens of `rows` requests.
    pub fn prefill(&self, rows: usize, tokens: u64) -> Result<Shape, Error> {
        if rows == 0 {
            return Err(Error::invalid("rows", "none", "at least one"));
        }
        if rows > self.prefills_max as usize {
            let most = format!("at most max_prefills_per_batch = {}", self.prefills_max);
            return Err(Error::invalid("rows", format!("{rows} prompts"), most));
        }
        let last = self.token_buckets.last();
        let fit = u32::try_from(tokens).ok().and_then(|tokens| self.token_buckets.fit(tokens).ok());
        fit.map(|tokens| Shape::Prefill { tokens }).ok_or_else(|| {
            Error::invalid("rows", format!("{tokens} tokens"), format!("at most the last token bucket, {last}"))
        })
    }

    /// Return the smallest shape that holds `rows` rows of at most `context` context tokens each. `bucket` overrides
    /// the context bucket, as in [`Layout::context`].
    pub fn decode(&self, rows: usize, context: u64, bucket: Option<i64>) -> Result<Shape, Error> {
        if rows == 0 {
            return Err(Error::invalid("rows", "none", "at least one"));
        }
        let last = self.seqs_buckets.last();
        let fit = u32::try_from(rows).ok().and_then(|rows| self.seqs_buckets.fit(rows).ok());
        let rows = fit.ok_or_else(|| {
            Error::invalid("rows", format!("{rows} rows"), format!("at most the last batch bucket, {last}"))
        })?;
        Ok(Shape::Decode { rows, context: self.context(context, bucket)? })
    }

    /// Return the smallest context bucket that holds `context` tokens, or `bucket`, which must be a context bucket and
    /// hold them.
    pub fn context(&self, context: u64, bucket: Option<i64>) -> Result<u32, Error> {
        let sizes = self.context_buckets.sizes();
        let Some(bucket) = bucket else {
            let fit = u32::try_from(context).ok().and_then(|context| self.context_buckets.fit(context).ok());
            return fit.ok_or_else(|| {
                let most = format!("at most max_model_len = {}", self.max_model_len);
                Error::invalid("rows", format!("a context of {context} tokens"), most)
            });
        };
        let found = u32::try_from(bucket).ok().filter(|size| sizes.binary_search(size).is_ok());
        found.filter(|&size| u64::from(size) >= context).ok_or_else(|| {
            Error::invalid("context_bucket", bucket, format!("one of {sizes:?} that holds {context} tokens"))
        })
    }

    /// Return whether token ids are checked against a vocabulary size.
    pub fn has_vocabulary(&self) -> bool {
        self.vocab_size.is_some()
    }

    /// Return the maximum number of prompts in a prefill step.
    pub fn prefills_max(&self) -> u32 {
        self.prefills_max
    }

    /// Return the number of columns of the block table: the blocks of the longest sequence for a prefill, those of the
    /// context bucket for a decode.
    pub fn table_width(&self, shape: Shape) -> u32 {
        match shape {
            Shape::Prefill { .. } => self.max_model_len.div_ceil(self.block_size),
            Shape::Decode { context, .. } => context.div_ceil(self.block_size),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::config::RawConfig;

    pub(in super::super) fn layout(change: impl FnOnce(&mut RawConfig)) -> Layout {
        let mut raw = RawConfig {
            max_num_seqs: Some(8),
            max_num_batched_tokens: Some(512),
            max_model_len: Some(1024),
            block_size: Some(64),
            num_blocks: Some(32),
            ..RawConfig::default()
        };
        change(&mut raw);
        Layout::new(&Config::resolve(&raw).unwrap(), Some(1000)).unwrap()
    }

    #[test]
    fn b03_every_shape_comes_from_the_buckets() {
        let layout = layout(|raw| raw.max_model_len = Some(317));
        let prefills: Vec<Shape> = layout.shapes().take_while(|shape| matches!(shape, Shape::Prefill { .. })).collect();
        assert_eq!(prefills, [128, 256, 317].map(|tokens| Shape::Prefill { tokens }));
        assert_eq!(layout.prefill(1, 300), Ok(Shape::Prefill { tokens: 317 }));
        assert_eq!(
            layout.prefill(1, 318).unwrap_err().to_string(),
            "rows: 318 tokens: expected at most the last token bucket, 317"
        );
        assert!(layout.shapes().all(|shape| layout.contains(shape)));
        assert!(!layout.contains(Shape::Prefill { tokens: 512 }));
    }

    #[test]
    fn the_smallest_context_bucket_that_holds_the_longest_row_is_chosen() {
        let layout = layout(|raw| raw.decode_context_length_buckets = Some(vec![128, 512]));
        let decode = |rows, context, bucket| layout.decode(rows, context, bucket);
        assert_eq!(decode(3, 128, None), Ok(Shape::Decode { rows: 4, context: 128 }));
        assert_eq!(decode(3, 129, None), Ok(Shape::Decode { rows: 4, context: 512 }));
        assert_eq!(decode(8, 513, None), Ok(Shape::Decode { rows: 8, context: 1024 }));
        assert_eq!(decode(1, 100, Some(512)), Ok(Shape::Decode { rows: 1, context: 512 }));
        assert_eq!(layout.table_width(Shape::Decode { rows: 1, context: 512 }), 8);
        assert!(decode(9, 1, None).is_err() && decode(0, 1, None).is_err() && decode(1, 1025, None).is_err());
        for bucket in [129, 256, -1, 128] {
            let refused = decode(1, 129, Some(bucket)).unwrap_err().to_string();
            let expected = "expected one of [128, 512, 1024] that holds 129 tokens";
            assert_eq!(refused, format!("context_bucket: {bucket}: {expected}"));
        }
    }

    #[test]
    fn context_parallelism_is_refused() {
        let raw = RawConfig {
            max_num_seqs: Some(1),
            max_num_batched_tokens: Some(512),
            max_model_len: Some(512),
            block_size: Some(64),
            num_blocks: Some(8),
            dcp: Some(2),
            ..RawConfig::default()
        };
        assert!(Layout::new(&Config::resolve(&raw).unwrap(), None).unwrap_err().to_string().starts_with("dcp: 2: "));
    }
}
