//! Types of field values, unchecked and checked.

use super::bucket::Buckets;
use super::choice::{Choice, Chunking, KvAdmission};
use crate::queue::Policy;

/// A type of checked field values.
pub trait Value: Sized {
    /// Type of the unchecked value.
    type Given: Clone + std::fmt::Debug;

    /// Names of the values, if they have names.
    const CHOICES: &'static [&'static str] = &[];
}

impl Value for u32 {
    type Given = i64;
}

impl Value for Option<u32> {
    type Given = i64;
}

impl Value for bool {
    type Given = Self;
}

impl Value for Buckets {
    type Given = Vec<i64>;
}

impl Value for Option<Buckets> {
    type Given = Vec<i64>;
}

/// Cost by padded tokens.
impl Value for Option<Vec<(u32, f64)>> {
    type Given = Vec<(i64, f64)>;
}

macro_rules! choices {
    ($($choice:ty),+) => {$(
        impl Value for $choice {
            type Given = String;

            const CHOICES: &'static [&'static str] = <Self as Choice>::NAMES;
        }
    )+};
}

choices!(KvAdmission, Chunking, Policy);
