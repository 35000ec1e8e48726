//! Requests as the core knows them: a compact handle, the slab that handles point into, and the prompt.

use crate::error::Error;

/// The largest count of tokens, requests or blocks that anything may name: positions and token ids travel
/// as 32-bit signed integers.
pub const TOKENS_MAX: u32 = i32::MAX as u32;

/// Handle of a request in one scheduler. A stale handle (its request is gone) never finds a newer
/// request, since the generation of a reused place differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row {
    index: u32,
    generation: u32,
}

impl Row {
    /// The place in tables that the caller keeps beside the scheduler: below the number of requests that
    /// were ever alive together, used again once a request is gone.
    pub fn index(self) -> usize {
        self.index as usize
    }

    /// The handle as a number, for callers who keep it outside; [`Row::from_bits`] is its inverse.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The handle that [`Row::to_bits`] gave; another number is a handle that finds nothing.
    pub fn from_bits(bits: u64) -> Self {
        #[allow(clippy::cast_possible_truncation, reason = "the two halves")]
        let (index, generation) = (bits as u32, (bits >> 32) as u32);
        Self { index, generation }
    }
}

/// A slab: constant-time insert, look-up and removal, no move of what stays.
#[derive(Clone, Debug)]
pub struct Rows<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Rows<T> {
    /// Keeps `value` and returns its handle.
    pub fn insert(&mut self, value: T) -> Row {
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.value = Some(value);
            return Row { index, generation: slot.generation };
        }
        let index = u32::try_from(self.slots.len()).expect("fewer than 2^32 live requests");
        self.slots.push(Slot { generation: 0, value: Some(value) });
        Row { index, generation: 0 }
    }

    /// The value behind `row`, or `None` when it is gone.
    pub fn get(&self, row: Row) -> Option<&T> {
        let slot = self.slots.get(row.index())?;
        if slot.generation == row.generation { slot.value.as_ref() } else { None }
    }

    /// As [`Rows::get`], to change.
    pub fn get_mut(&mut self, row: Row) -> Option<&mut T> {
        let slot = self.slots.get_mut(row.index())?;
        if slot.generation == row.generation { slot.value.as_mut() } else { None }
    }

    /// Takes the value out and frees its place.
    pub fn remove(&mut self, row: Row) -> Option<T> {
        let slot = self.slots.get_mut(row.index())?;
        if slot.generation != row.generation {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(row.index);
        Some(value)
    }

    /// Number of values kept.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory held by the slab itself, spare room included.
    pub fn heap_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot<T>>() + self.free.capacity() * size_of::<u32>()
    }
}

/// Tokens that one id of [`Prompt::Segments`] stands for, as in the Mooncake traces.
pub const SEGMENT_TOKENS: u32 = 512;

/// The largest id of a segment: a token is known by the id of its segment and its place there, in 63 bits.
pub const SEGMENT_ID_MAX: u64 = (1 << 54) - 1;

/// The prompt of a request. Without contents nothing of it can be shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// So many tokens, contents unknown.
    Length(u32),
    /// Token ids.
    Tokens(Box<[u32]>),
    /// Contents known by segments of [`SEGMENT_TOKENS`]: equal ids stand for equal tokens.
    Segments {
        /// One id a segment; the last may be cut short by the length.
        ids: Box<[u64]>,
        /// Tokens in all.
        length: u32,
    },
}

impl Prompt {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Self::Length(length) | Self::Segments { length, .. } => *length as usize,
            Self::Tokens(ids) => ids.len(),
        }
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses an empty prompt, and ids that stand for nothing.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let fault = |field, value: String, expected| Err(Error::invalid(field, value, expected));
        if self.is_empty() {
            return fault("prompt", "no tokens".to_owned(), "at least one token".to_owned());
        }
        match self {
            Self::Length(_) => Ok(()),
            Self::Tokens(ids) => match ids.iter().find(|&&id| id > TOKENS_MAX) {
                Some(id) => fault("prompt", id.to_string(), format!("token ids from 0 to {TOKENS_MAX}")),
                None => Ok(()),
            },
            Self::Segments { ids, length } => {
                if let Some(id) = ids.iter().find(|&&id| id > SEGMENT_ID_MAX) {
                    return fault("hash_ids", id.to_string(), format!("ids from 0 to {SEGMENT_ID_MAX}"));
                }
                if ids.len() < length.div_ceil(SEGMENT_TOKENS) as usize {
                    let expected = format!("one id for each {SEGMENT_TOKENS} of {length} prompt tokens");
                    return fault("hash_ids", format!("{} ids", ids.len()), expected);
                }
                Ok(())
            }
        }
    }

    /// A number that tells the content of the token at `at` from every other content.
    fn content(&self, at: u32) -> Option<u64> {
        match self {
            Self::Length(_) => None,
            Self::Tokens(ids) => ids.get(at as usize).map(|&id| id.into()),
            Self::Segments { ids, length } => {
                let id = ids.get((at / SEGMENT_TOKENS) as usize)?;
                (at < *length).then(|| (id * u64::from(SEGMENT_TOKENS) + u64::from(at % SEGMENT_TOKENS)) | (1 << 63))
            }
        }
    }
}

/// What a request asks of the sampler. The scheduler only carries it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// -1 is off.
    pub top_k: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is greedy.
    pub temperature: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { top_k: -1.0, top_p: 1.0, temperature: 0.0 }
    }
}

/// Outputs of a request that asks for `max_tokens`: its sequence ends with the longest one, but it emits one
/// token at least.
pub fn outputs_max(prompt: u32, max_tokens: u32, max_model_len: u32) -> u32 {
    max_tokens.min(max_model_len.saturating_sub(prompt).max(1))
}

/// Stands for an output token whose id was not told.
pub const UNKNOWN_TOKEN: u32 = u32::MAX;

/// Prompt and outputs of one request.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// The prompt.
    pub prompt: &'a Prompt,
    /// Output token ids, [`UNKNOWN_TOKEN`] where one was not told.
    pub outputs: &'a [u32],
}

impl Sequence<'_> {
    /// Reads the contents of `count` tokens from `start` into `tokens`; `false` when one is not known.
    pub fn read(&self, start: u32, count: u32, tokens: &mut Vec<u64>) -> bool {
        tokens.clear();
        let prompt = self.prompt.len();
        for at in start..start + count {
            let content = match (at as usize).checked_sub(prompt) {
                None => self.prompt.content(at),
                Some(output) => self.outputs.get(output).filter(|&&id| id != UNKNOWN_TOKEN).map(|&id| id.into()),
            };
            let Some(content) = content else { return false };
            tokens.push(content);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_finds_nothing() {
        let mut rows = Rows::default();
        let a = rows.insert('a');
        assert_eq!(rows.remove(a), Some('a'));
        let b = rows.insert('b');
        assert_eq!(a.index(), b.index());
        assert_eq!((rows.get(a), rows.get(b)), (None, Some(&'b')));
        assert_eq!(rows.remove(a), None);
        assert_eq!(rows.len(), 1);
    }
}
