//! The running requests as columns, with one clock for all decoding requests.

use super::request::RunningRequest;
use crate::request::Row;

/// Fields that are fixed at admission and that decode steps do not read.
#[derive(Clone, Copy, Debug)]
struct AtAdmission {
    hit: u32,
    needs_tokens: bool,
}

/// All running requests in order of admission, one column per field.
///
/// Decoding requests come first, because no request is admitted while a prompt is prefilling. A decode step adds one
/// token to each of them, so their counts are stored relative to a clock of decode steps, and the step moves the clock
/// only. The work on requests then grows with those that end or need a KV block, not with all that are running.
///
/// A *projected* count is the count once the planned steps have run.
#[derive(Clone, Debug, Default)]
pub(super) struct RunningRequests {
    rows: Vec<Row>,
    slots: Vec<u32>,
    prompt_lens: Vec<u32>,
    ends: Vec<u32>,
    at_admission: Vec<AtAdmission>,
    /// Tokens computed by completed steps; for a decoding request minus the clock, modulo 2^32.
    counts: Vec<u32>,
    /// Tokens of planned steps, for requests that are not decoding yet.
    planned: Vec<u32>,
    /// Number of requests with `needs_tokens`.
    num_needing_tokens: usize,
    /// Number of decoding requests.
    decoding: usize,
    /// Number of completed decode steps.
    clock: u64,
    /// Number of decode steps in flight.
    planned_decodes: u32,
    /// Clock at which the next decoding request ends.
    next_end: u64,
}

impl RunningRequests {
    pub(super) fn new() -> Self {
        // In debug builds the low 32 bits of the clock wrap around after 64 decode steps, so the tests cover it.
        Self { clock: if cfg!(debug_assertions) { (1 << 32) - 64 } else { 0 }, ..Self::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn get(&self, at: usize) -> RunningRequest {
        let decoding = at < self.decoding;
        let (end, computed) = (self.ends[at], self.computed(at));
        let AtAdmission { hit, needs_tokens } = self.at_admission[at];
        RunningRequest {
            row: self.rows[at],
            slot: self.slots[at],
            prompt_len: self.prompt_lens[at],
            end,
            hit,
            computed,
            planned: if decoding { self.planned_decodes.min(end - computed) } else { self.planned[at] },
            decoding,
            needs_tokens,
        }
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = RunningRequest> + Clone + '_ {
        self.iter_from(0)
    }

    /// Return the requests from position `first` on.
    pub(super) fn iter_from(&self, first: usize) -> impl ExactSizeIterator<Item = RunningRequest> + Clone + '_ {
        (first..self.len()).map(|at| self.get(at))
    }

    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub(super) fn slots(&self) -> &[u32] {
        &self.slots
    }

    pub(super) fn any_needs_tokens(&self) -> bool {
        self.num_needing_tokens > 0
    }

    pub(super) fn all_need_tokens(&self) -> bool {
        self.num_needing_tokens == self.len()
    }

    /// Append a request that is prefilling.
    pub(super) fn push(&mut self, entry: RunningRequest) {
        let RunningRequest { row, slot, prompt_len, end, hit, computed, planned, decoding, needs_tokens } = entry;
        assert!(!decoding && computed < prompt_len, "an admitted request has prompt tokens left");
        self.rows.push(row);
        self.slots.push(slot);
        self.prompt_lens.push(prompt_len);
        self.ends.push(end);
        self.at_admission.push(AtAdmission { hit, needs_tokens });
        self.counts.push(computed);
        self.planned.push(planned);
        self.num_needing_tokens += usize::from(needs_tokens);
    }

    /// Remove the requests at `positions`, which are ascending, and append them to `removed`.
    pub(super) fn remove(&mut self, positions: &[usize], removed: &mut Vec<RunningRequest>) {
        fn remove_from<T: Copy>(column: &mut Vec<T>, positions: &[usize]) {
            for (removed_before, &at) in positions.iter().enumerate() {
                let next = positions.get(removed_before + 1).copied().unwrap_or(column.len());
                column.copy_within(at + 1..next, at - removed_before);
            }
            column.truncate(column.len() - positions.len());
        }
        let mut next_end_removed = false;
        for &at in positions {
            let entry = self.get(at);
            if at < self.decoding {
                next_end_removed |= self.clock + u64::from(entry.end - entry.computed) == self.next_end;
            }
            removed.push(entry);
        }
        self.decoding -= positions.partition_point(|&at| at < self.decoding);
        remove_from(&mut self.rows, positions);
        remove_from(&mut self.slots, positions);
        remove_from(&mut self.prompt_lens, positions);
        remove_from(&mut self.ends, positions);
        remove_from(&mut self.at_admission, positions);
        remove_from(&mut self.counts, positions);
        remove_from(&mut self.planned, positions);
        let removed = &removed[removed.len() - positions.len()..];
        self.num_needing_tokens -= removed.iter().filter(|entry| entry.needs_tokens).count();
        if next_end_removed {
            self.find_next_end();
        }
    }

    /// Number of completed decode steps.
    pub(super) fn clock(&self) -> u64 {
        self.clock
    }

    /// Clock at which the next decode step to plan will run.
    pub(super) fn next_clock(&self) -> u64 {
        self.clock + u64::from(self.planned_decodes)
    }

    /// Number of decoding requests.
    pub(super) fn decoding(&self) -> usize {
        self.decoding
    }

    /// Projected number of decoding requests.
    pub(super) fn projected_decoding(&self) -> usize {
        (self.decoding..self.len()).rev().find(|&at| !self.is_prefilling(at)).map_or(self.decoding, |at| at + 1)
    }

    /// Whether the newest request has projected prompt tokens left.
    pub(super) fn newest_prefilling(&self) -> bool {
        self.len().checked_sub(1).is_some_and(|last| last >= self.decoding && self.is_prefilling(last))
    }

    /// Whether the projected count of one of the first `count` requests has reached its end.
    pub(super) fn any_at_end(&self, count: usize) -> bool {
        let at_end = |at: usize| self.counts[at] + self.planned[at] == self.ends[at];
        self.next_end <= self.next_clock() || (self.decoding..count).any(at_end)
    }

    /// Append the positions of the decoding requests that have reached their end, which the caller must remove. The
    /// next end is that of the other requests.
    pub(super) fn take_at_end(&mut self, positions: &mut Vec<usize>) {
        let clock = low(self.clock);
        let mut least = u32::MAX;
        for (at, (end, count)) in self.ends[..self.decoding].iter().zip(&self.counts[..self.decoding]).enumerate() {
            let left = end - count.wrapping_add(clock);
            if left == 0 {
                positions.push(at);
            } else {
                least = least.min(left);
            }
        }
        self.next_end = self.clock + u64::from(least);
    }

    /// Number of decode steps until the next decoding request ends, if no step is in flight.
    pub(super) fn horizon(&self) -> u32 {
        u32::try_from(self.next_end - self.clock).unwrap_or(u32::MAX)
    }

    /// Projected computed tokens of the first `count` requests, none of which may have reached its end.
    pub(super) fn projected(&self, count: usize) -> impl Iterator<Item = u32> + Clone + '_ {
        let clock = low(self.next_clock());
        let decoding = self.counts[..self.decoding].iter().map(move |computed| computed.wrapping_add(clock));
        let prefilling = self.counts[self.decoding..count].iter().zip(&self.planned[self.decoding..count]);
        decoding.chain(prefilling.map(|(computed, planned)| computed + planned))
    }

    /// Whether each of the first `count` requests has projected prompt tokens left.
    pub(super) fn prefilling(&self, count: usize) -> impl Iterator<Item = bool> + Clone + '_ {
        let clock = low(self.next_clock());
        let decoding = self.counts[..self.decoding].iter().zip(&self.prompt_lens[..self.decoding]);
        // Both are below 2^31, and the compiler vectorises a comparison of signed numbers.
        let left = move |(count, prompt): (&u32, &u32)| count.wrapping_add(clock).cast_signed() < prompt.cast_signed();
        let decoding = decoding.map(left);
        decoding.chain((self.decoding..count).map(|at| self.is_prefilling(at)))
    }

    /// Plan `tokens` more for the request at `at`, which is not decoding.
    pub(super) fn plan(&mut self, at: usize, tokens: u32) {
        debug_assert!(at >= self.decoding, "decoding requests are planned together");
        self.planned[at] += tokens;
    }

    /// Plan a decode step.
    pub(super) fn plan_decode(&mut self) {
        self.planned_decodes += 1;
    }

    /// Discard the tokens of all planned steps.
    pub(super) fn discard_planned(&mut self) {
        self.planned_decodes = 0;
        self.planned[self.decoding..].fill(0);
    }

    /// Complete the oldest planned decode step `times` times. Returns whether a request has reached its end.
    pub(super) fn complete_decode(&mut self, times: u32) -> bool {
        self.planned_decodes -= 1;
        self.clock += u64::from(times);
        self.decoding > 0 && self.clock == self.next_end
    }

    /// Move `tokens` of the request at `at` from planned to computed. Returns whether the request has reached its end.
    pub(super) fn complete_prefill(&mut self, at: usize, tokens: u32) -> bool {
        self.counts[at] += tokens;
        self.planned[at] -= tokens;
        self.counts[at] == self.ends[at]
    }

    /// Move the oldest prefilling request to the decoding requests, if its prompt is computed. Returns its slot, its
    /// computed tokens, and the clock at which it ends.
    pub(super) fn start_decoding(&mut self) -> Option<(u32, u32, u64)> {
        let at = self.decoding;
        let computed = *self.counts.get(at)?;
        if computed < self.prompt_lens[at] {
            return None;
        }
        let end = self.clock + u64::from(self.ends[at] - computed);
        self.counts[at] = computed.wrapping_sub(low(self.clock));
        // Its token in a decode step in flight is counted by `planned_decodes` from now on.
        self.planned[at] = 0;
        self.next_end = if self.decoding == 0 { end } else { self.next_end.min(end) };
        self.decoding += 1;
        Some((self.slots[at], computed, end))
    }

    fn computed(&self, at: usize) -> u32 {
        let count = self.counts[at];
        if at < self.decoding { count.wrapping_add(low(self.clock)) } else { count }
    }

    /// Whether the request at `at`, which is not decoding, has projected prompt tokens left.
    fn is_prefilling(&self, at: usize) -> bool {
        self.counts[at] + self.planned[at] < self.prompt_lens[at]
    }

    fn find_next_end(&mut self) {
        let columns = self.ends[..self.decoding].iter().zip(&self.counts[..self.decoding]);
        let clock = low(self.clock);
        let left = columns.map(|(end, count)| end.wrapping_sub(count.wrapping_add(clock))).min();
        self.next_end = left.map_or(u64::MAX, |left| self.clock + u64::from(left));
    }
}

/// Return the low 32 bits of the clock, to which counts are relative.
fn low(clock: u64) -> u32 {
    (clock & u64::from(u32::MAX)).try_into().expect("masked")
}
