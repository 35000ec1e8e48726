//! Fields with named values.

use crate::queue::Policy;

/// A type with named values.
pub trait Choice: Copy + Default + PartialEq + 'static {
    /// Every value, the default first.
    const ALL: &'static [Self];

    /// Their names, in the same order.
    const NAMES: &'static [&'static str];

    /// Return the name of the value.
    fn name(self) -> &'static str {
        let at = Self::ALL.iter().position(|&choice| choice == self).expect("`ALL` lists every value");
        Self::NAMES[at]
    }

    /// Return the value of that name, if there is one.
    fn from_name(name: &str) -> Option<Self> {
        let at = Self::NAMES.iter().position(|&known| known == name)?;
        Some(Self::ALL[at])
    }
}

/// How many KV blocks a request reserves when it is admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvAdmission {
    /// The blocks of the request's own worst case.
    #[default]
    Reserve,
    /// The blocks of a sequence of `max_model_len` tokens.
    MaxModelLen,
}

impl Choice for KvAdmission {
    const ALL: &'static [Self] = &[Self::Reserve, Self::MaxModelLen];
    const NAMES: &'static [&'static str] = &["reserve", "max_model_len"];
}

/// How a prompt longer than one step is cut into chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Chunking {
    /// Each chunk is as large as the step allows.
    #[default]
    Fixed,
    /// Chunks end on a bucket edge if that is cheaper according to the cost table.
    Bucket,
}

impl Choice for Chunking {
    const ALL: &'static [Self] = &[Self::Fixed, Self::Bucket];
    const NAMES: &'static [&'static str] = &["fixed", "bucket"];
}

impl Choice for Policy {
    const ALL: &'static [Self] = &[Self::Fcfs, Self::Priority];
    const NAMES: &'static [&'static str] = &["fcfs", "priority"];
}
