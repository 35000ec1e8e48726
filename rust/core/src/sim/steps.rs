//! The recorded steps of a replay, stored as runs of identical steps.

use super::distribution::seconds;
use crate::decide::Kind;

/// One row of a recorded step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Position of the request in the workload.
    pub request: u32,
    /// Number of tokens computed for the request.
    pub tokens: u32,
}

/// One recorded step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded<'a> {
    /// Start in nanoseconds from time zero.
    pub start: u64,
    /// End in nanoseconds from time zero.
    pub end: u64,
    /// Prefill or decode.
    pub kind: Kind,
    /// The rows of the step, in batch order.
    pub entries: &'a [Entry],
    /// Padded number of tokens.
    pub padded: u32,
}

impl Recorded<'_> {
    /// Return the time from time zero to the start of the step, in seconds.
    pub fn start_s(&self) -> f64 {
        seconds(self.start)
    }

    /// Return the time from time zero to the end of the step, in seconds.
    pub fn end_s(&self) -> f64 {
        seconds(self.end)
    }
}

/// The recorded steps, in time order.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    runs: Vec<Run>,
    entries: Vec<Entry>,
    count: u64,
}

#[derive(Clone, Debug)]
struct Run {
    /// Index of the first step.
    first: u64,
    start: u64,
    /// Duration of each step.
    time: u64,
    kind: Kind,
    /// Start of the run's rows in [`Steps::entries`].
    entries: usize,
    padded: u32,
}

impl Steps {
    /// Add a run of `times` identical steps of `time` nanoseconds each.
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

    /// Return the number of steps.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Return whether there are no steps.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Return the step at `index`.
    pub fn get(&self, index: u64) -> Option<Recorded<'_>> {
        if index >= self.count {
            return None;
        }
        let at = self.runs.partition_point(|run| run.first <= index) - 1;
        let run = &self.runs[at];
        let end = self.runs.get(at + 1).map_or(self.entries.len(), |next| next.entries);
        let start = run.start + (index - run.first) * run.time;
        let entries = &self.entries[run.entries..end];
        Some(Recorded { start, end: start + run.time, kind: run.kind, entries, padded: run.padded })
    }

    /// Return an iterator over every step.
    pub fn iter(&self) -> impl Iterator<Item = Recorded<'_>> {
        (0..self.count).filter_map(|index| self.get(index))
    }
}

/// Equality of the steps, independent of how they are grouped into runs.
impl PartialEq for Steps {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && self.iter().eq(other.iter())
    }
}
