//! The declaration of every configuration field, and the types derived from it.

use super::bucket::Buckets;
use super::check::{Check, Checked};
use super::choice::{Chunking, KvAdmission};
use super::field::{Field, FieldDefault, FieldKind, Source};
use super::value::Value;
use crate::error::Fault;
use crate::queue::Policy;

/// Calls the macro `$derive` with the declaration of every configuration field.
///
/// A field is declared as
///
/// ```text
/// /// Meaning, in one sentence on one line.
/// name: Type = Kind, Default, Source;
/// ```
///
/// with a [`FieldKind`], a [`FieldDefault`] and a [`Source`]. The order is that of `NeuronConfig.as_dict()` and of
/// reported faults. `CONTRIBUTING.md` shows how to add a field.
#[macro_export]
macro_rules! config_fields {
    ($derive:ident) => {
        $derive! {
            /// Maximum number of requests that run at once; each holds one batch slot.
            max_num_seqs: u32 = Count(1), Required, VllmFlag("--max-num-seqs");
            /// Maximum number of tokens in one step; at least `max_num_seqs`.
            max_num_batched_tokens: u32 = Count(1), Required, VllmFlag("--max-num-batched-tokens");
            /// Maximum length of a sequence in tokens, prompt and outputs together.
            max_model_len: u32 = Count(1), Required, VllmFlag("--max-model-len");
            /// Number of tokens in one KV block.
            block_size: u32 = Count(1), Required, VllmFlag("--block-size");
            /// Number of usable KV blocks; their ids are 1 to `num_blocks`, and block 0 is never allocated.
            num_blocks: u32 = Count(1), Required, VllmFlag("--num-gpu-blocks-override");
            /// Compiled prefill sizes in tokens, ascending; the last is `min(max_num_batched_tokens, max_model_len)`.
            num_batched_tokens_buckets: Buckets = Sizes, Derived("doubling from 128"), NeuronConfig;
            /// Compiled decode batch sizes in rows, ascending; the last is `max_num_seqs`.
            num_seqs_buckets: Buckets = Sizes, Derived("doubling from 1"), NeuronConfig;
            /// Compiled decode context lengths in tokens, ascending; `max_model_len` is added if it is not the last.
            decode_context_length_buckets: Buckets = Sizes, Derived("max_model_len alone"), NeuronConfig;
            /// Segment sizes of a device that prefills in segments; given alone, they are also the token buckets.
            kv_segment_size_buckets: Option<Buckets> = Sizes, Unset("no segments"), NeuronConfig;
            /// Maximum number of prompts that start in one prefill step.
            max_prefills_per_batch: u32 = Count(1), Number(1), NeuronConfig;
            /// KV blocks that a request reserves: its own worst case, or those of a sequence of `max_model_len` tokens.
            kv_admission: KvAdmission = Choice, Name("reserve"), NeuronConfig;
            /// Maximum number of prefill steps in a row while a request could decode.
            max_consecutive_prefill_steps: Option<u32> = Count(1), Unset("no limit"), NeuronConfig;
            /// Number of decode steps that follow once `max_consecutive_prefill_steps` is reached.
            min_decode_steps: u32 = Count(1), Number(1), NeuronConfig;
            /// How a long prompt is cut: as much as a step takes, or where ending on a bucket edge is cheaper.
            chunking: Chunking = Choice, Name("fixed"), NeuronConfig;
            /// Cost of a prefill step by padded tokens, in any unit, for chunking `"bucket"`.
            prefill_cost: Option<Vec<(u32, f64)>> = Costs, Unset("padded tokens + 256"), NeuronConfig;
            /// Maximum number of prompt tokens in a step while other requests run or wait; 0 is no limit.
            long_prefill_token_threshold: u32 = Count(0), Number(0), VllmFlag("--long-prefill-token-threshold");
            /// Whether requests share full KV blocks of equal content.
            prefix_caching: bool = Flag, Off, VllmFlag("--enable-prefix-caching");
            /// Order of the waiting queue: first come first served, or the lower priority number first.
            policy: Policy = Choice, Name("fcfs"), VllmFlag("--scheduling-policy");
            /// Number of tokens beyond the next one that have KV slots, for speculative decoding.
            lookahead: u32 = Count(0), Number(0), VllmFlag("--speculative-config");
            /// Decode context parallel size; above 1, token buckets must be divisible by `dcp * block_size`.
            dcp: u32 = Count(1), Number(1), VllmFlag("--decode-context-parallel-size");
        }
    };
}

macro_rules! define_config {
    ($(
        #[doc = $meaning:literal]
        $name:ident: $value:ty
            = $kind:ident $(($least:literal))?, $default:ident $(($given:literal))?, $source:ident $(($flag:literal))?;
    )+) => {
        /// A configuration as given: fields that are absent are `None`, nothing is checked.
        #[derive(Clone, Debug, Default)]
        pub struct RawConfig {
            $(
                #[doc = $meaning]
                pub $name: Option<<$value as Value>::Given>,
            )+
            /// Faults found while the fields were read, such as a wrong type; reported with all others.
            pub faults: Vec<Fault>,
        }

        /// A checked configuration with every default filled in.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $(
                #[doc = $meaning]
                pub $name: $value,
            )+
        }

        /// Every field by name.
        pub(super) struct Fields {
            $(pub(super) $name: Field,)+
        }

        pub(super) const FIELD: Fields = Fields {
            $(
                $name: Field {
                    name: stringify!($name),
                    kind: FieldKind::$kind $(($least))?,
                    choices: <$value as Value>::CHOICES,
                    default: FieldDefault::$default $(($given))?,
                    meaning: $meaning.trim_ascii(),
                    source: Source::$source $(($flag))?,
                },
            )+
        };

        /// Every field, in the order of the declaration.
        pub const FIELDS: &[Field] = &[$(FIELD.$name,)+];

        /// Fields checked against their own bounds; `None` if a rule of `rules` decides, or if a fault was found.
        pub(super) struct Partial {
            $(pub(super) $name: Option<$value>,)+
        }

        impl Partial {
            pub(super) fn new(raw: &RawConfig, check: &mut Check) -> Self {
                Self { $($name: Checked::check(check, &FIELD.$name, raw.$name.as_ref()),)+ }
            }

            pub(super) fn complete(self) -> Option<Config> {
                Some(Config { $($name: self.$name?,)+ })
            }
        }
    };
}

config_fields!(define_config);
