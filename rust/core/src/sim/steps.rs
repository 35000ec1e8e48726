//! The steps of a replay, kept as runs of equal steps.

use super::spread::seconds;
use crate::decide::Kind;

/// What one request had in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its place in the workload.
    pub request: u32,
    /// Its tokens.
    pub tokens: u32,
}

/// One step, as read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded<'a> {
    /// Start in nanoseconds from time zero.
    pub start: u64,
    /// End in nanoseconds from time zero.
    pub end: u64,
    /// Prefill or decode.
    pub kind: Kind,
    /// Who ran, in batch order.
    pub entries: &'a [Entry],
    /// Tokens as padded.
    pub padded: u32,
}

impl Recorded<'_> {
    /// Seconds from time zero to its start.
    pub fn start_s(&self) -> f64 {
        seconds(self.start)
    }

    /// Seconds from time zero to its end.
    pub fn end_s(&self) -> f64 {
        seconds(self.end)
    }
}

/// Steps in time order.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    runs: Vec<Run>,
    entries: Vec<Entry>,
    count: u64,
}

#[derive(Clone, Debug)]
struct Run {
    /// Number of its first step.
    first: u64,
    start: u64,
    /// Time of each step.
    time: u64,
    kind: Kind,
    /// Where its entries start.
    entries: usize,
    padded: u32,
}

impl Steps {
    /// Adds `times` equal steps.
    pub(super) fn push(
        &mut self,
        (start, time, times): (u64, u64, u64),
        kind: Kind,
        padded: u32,
        entries: impl Iterator<Item = Entry>,
    ) {
        self.runs.push(Run { first: self.count, start, time, kind, entries: self.entries.len(), padded });
        self.entries.extend(entries);
        self.count += times;
    }

    /// Number of steps.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether nothing ran.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The step of that number.
    pub fn get(&self, number: u64) -> Option<Recorded<'_>> {
        if number >= self.count {
            return None;
        }
        let at = self.runs.partition_point(|run| run.first <= number) - 1;
        let run = &self.runs[at];
        let end = self.runs.get(at + 1).map_or(self.entries.len(), |next| next.entries);
        let start = run.start + (number - run.first) * run.time;
        let entries = &self.entries[run.entries..end];
        Some(Recorded { start, end: start + run.time, kind: run.kind, entries, padded: run.padded })
    }

    /// Every step.
    pub fn iter(&self) -> impl Iterator<Item = Recorded<'_>> {
        (0..self.count).filter_map(|number| self.get(number))
    }
}

/// Equal steps, whatever the runs.
impl PartialEq for Steps {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && self.iter().eq(other.iter())
    }
}
