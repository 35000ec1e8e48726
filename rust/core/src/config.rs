//! Configuration of the exclusive scheduler.
//!
//! `fields` declares every field once: name, type, bounds, default, meaning, and the vLLM flag that sets it.
//! [`RawConfig`], [`Config`], [`FIELDS`] and the Python class are derived from the declaration. `rules` has the checks
//! that a declaration cannot express: bounds between fields, and the bucket lists.

mod bucket;
mod check;
mod choice;
mod field;
mod fields;
mod resolve;
mod rules;
mod value;

pub use crate::request::TOKENS_MAX;
pub use bucket::{Buckets, common_divisor};
pub use choice::{Choice, Chunking, KvAdmission};
pub use field::{Field, FieldDefault, FieldKind, Source};
pub use fields::{Config, FIELDS, RawConfig};
pub use value::Value;
