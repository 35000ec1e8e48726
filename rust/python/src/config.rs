//! `NeuronConfig` and `Buckets`: configuration values that the core checks.
//!
//! The signature, the getters and `as_dict` of `NeuronConfig` are derived from the core's declaration of the fields.

mod bucket;
mod field;
mod neuron_config;
mod read;
mod value;

pub(crate) use bucket::Buckets;
pub(crate) use field::ConfigField;
pub(crate) use neuron_config::NeuronConfig;
