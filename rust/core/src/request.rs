//! A request as the core sees it: a compact handle, the slab that the handle indexes, and the prompt.

use crate::error::Error;

/// Largest count of tokens, requests or blocks, and largest token id: tensors hold positions and token ids as int32.
pub const TOKENS_MAX: u32 = i32::MAX as u32;

/// Handle of a request in one scheduler.
///
/// The handle of a removed request is stale and never finds a newer request: each use of an index has its own
/// generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row {
    index: u32,
    generation: u32,
}

impl Row {
    /// Index for tables that the caller keeps beside the scheduler.
    ///
    /// It is smaller than the largest number of requests that were alive at once, and is reused after the request is
    /// removed.
    pub fn index(self) -> usize {
        self.index as usize
    }

    /// Return the handle as an integer, for callers that store it outside Rust. [`Row::from_bits`] is the inverse.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// Return the handle that [`Row::to_bits`] encoded. Any other number gives a handle that finds no request.
    pub fn from_bits(bits: u64) -> Self {
        #[allow(clippy::cast_possible_truncation, reason = "the two halves of the number")]
        let (index, generation) = (bits as u32, (bits >> 32) as u32);
        Self { index, generation }
    }
}

/// Values by handle, with insertion, look-up and removal in constant time.
#[derive(Clone, Debug)]
pub struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Insert `value` and return its handle.
    pub fn insert(&mut self, value: T) -> Row {
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            entry.value = Some(value);
            return Row { index, generation: entry.generation };
        }
        let index = u32::try_from(self.entries.len()).expect("fewer than 2^32 live requests");
        self.entries.push(Entry { generation: 0, value: Some(value) });
        Row { index, generation: 0 }
    }

    /// Return the value of `row`, or `None` if it was removed.
    pub fn get(&self, row: Row) -> Option<&T> {
        let entry = self.entries.get(row.index())?;
        if entry.generation == row.generation { entry.value.as_ref() } else { None }
    }

    /// Return the value of `row` for mutation, or `None` if it was removed.
    pub fn get_mut(&mut self, row: Row) -> Option<&mut T> {
        let entry = self.entries.get_mut(row.index())?;
        if entry.generation == row.generation { entry.value.as_mut() } else { None }
    }

    /// Remove and return the value of `row`, or return `None` if it was removed before. The index becomes free.
    pub fn remove(&mut self, row: Row) -> Option<T> {
        let entry = self.entries.get_mut(row.index())?;
        if entry.generation != row.generation {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(row.index);
        Some(value)
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Whether the slab is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of heap memory that the slab itself holds, unused capacity included.
    pub fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry<T>>() + self.free.capacity() * size_of::<u32>()
    }
}

/// Tokens of one segment of [`Prompt::Segments`], as in the Mooncake traces.
pub const SEGMENT_TOKENS: u32 = 512;

/// Largest id of a segment: the id and the token's offset in the segment together fit in 63 bits.
pub const SEGMENT_ID_MAX: u64 = (1 << 54) - 1;

/// The prompt of a request. Requests share KV blocks only if the contents of their prompts are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Number of tokens, with unknown contents.
    Length(u32),
    /// Token ids.
    Tokens(Box<[u32]>),
    /// Ids of segments of [`SEGMENT_TOKENS`] tokens each: segments with equal ids have equal contents.
    Segments {
        /// One id per segment. The prompt may end within the last segment.
        ids: Box<[u64]>,
        /// Number of tokens of the prompt.
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

    /// Whether the prompt has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return [`Error::Invalid`] if the prompt is empty, an id is out of range, or a segment has no id.
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

    /// Return a number that identifies the content of the token at `position`, or `None` if the content is unknown.
    fn content(&self, position: u32) -> Option<u64> {
        match self {
            Self::Length(_) => None,
            Self::Tokens(ids) => ids.get(position as usize).map(|&id| id.into()),
            Self::Segments { ids, length } => {
                let id = ids.get((position / SEGMENT_TOKENS) as usize)?;
                let offset = position % SEGMENT_TOKENS;
                // The highest bit tells these numbers from token ids.
                (position < *length).then(|| (id * u64::from(SEGMENT_TOKENS) + u64::from(offset)) | (1 << 63))
            }
        }
    }
}

/// Sampling parameters of a request. The scheduler only passes them on to the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Number of most likely tokens to sample from; -1 means all.
    pub top_k: f32,
    /// Cumulative probability of the tokens to sample from; 1 means all.
    pub top_p: f32,
    /// Sampling temperature; 0 means greedy.
    pub temperature: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { top_k: -1.0, top_p: 1.0, temperature: 0.0 }
    }
}

/// Return the most output tokens of a request that asks for `max_tokens`. Prompt and outputs together have at most
/// `max_model_len` tokens, but a request generates at least one output.
pub fn outputs_max(prompt: u32, max_tokens: u32, max_model_len: u32) -> u32 {
    max_tokens.min(max_model_len.saturating_sub(prompt).max(1))
}

/// Sentinel: the caller gave no id for this output token.
pub const UNKNOWN_TOKEN: u32 = u32::MAX;

/// Prompt and outputs of one request, addressed by position.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// The prompt.
    pub prompt: &'a Prompt,
    /// Output token ids; [`UNKNOWN_TOKEN`] for an output without a known id.
    pub outputs: &'a [u32],
}

impl Sequence<'_> {
    /// Write the contents of `count` tokens from position `start` into `tokens`. Returns `false` if the content of one
    /// of them is unknown.
    pub fn read(&self, start: u32, count: u32, tokens: &mut Vec<u64>) -> bool {
        tokens.clear();
        let prompt = self.prompt.len();
        for position in start..start + count {
            let content = match (position as usize).checked_sub(prompt) {
                None => self.prompt.content(position),
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
        let mut rows = Slab::default();
        let a = rows.insert('a');
        assert_eq!(rows.remove(a), Some('a'));
        let b = rows.insert('b');
        assert_eq!(a.index(), b.index());
        assert_eq!((rows.get(a), rows.get(b)), (None, Some(&'b')));
        assert_eq!(rows.remove(a), None);
        assert_eq!(rows.len(), 1);
    }
}
