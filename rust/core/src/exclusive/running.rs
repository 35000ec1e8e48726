//! The running requests as every step looks at them, and the clock of those that decode.

use crate::request::{Prompt, Row};

/// One running request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) row: Row,
    /// Where its `Started` is.
    pub(super) seat: u32,
    pub(super) prompt: u32,
    /// Computed tokens with which it ends by length: the last output is never computed.
    pub(super) end: u32,
    /// Tokens that were computed before it started: it shares their blocks.
    pub(super) hit: u32,
    /// Tokens computed by completed steps.
    pub(super) computed: u32,
    /// Tokens of planned steps.
    pub(super) planned: u32,
    /// Whether its prompt is done.
    pub(super) decoding: bool,
    /// Whether its outputs must be told: its prompt was.
    pub(super) told: bool,
}

impl Lane {
    /// Tokens computed once the planned steps have run.
    pub(super) fn projected(&self) -> u32 {
        self.computed + self.planned
    }

    /// Whether some of the prompt is left then.
    pub(super) fn prefilling(&self) -> bool {
        self.projected() < self.prompt
    }

    /// Whether it can decode then.
    pub(super) fn ready(&self) -> bool {
        (self.prompt..self.end).contains(&self.projected())
    }

    /// Prompt tokens that count as left: the whole prompt until the first chunk has run, so that packing
    /// and the first chunk do not depend on what was shared.
    pub(super) fn rest(&self) -> u32 {
        if self.projected() == self.hit { self.prompt } else { self.prompt - self.projected() }
    }

    /// Tokens emitted after `computed` tokens.
    pub(super) fn generated(computed: u32, prompt: u32) -> u32 {
        (computed + 1).saturating_sub(prompt)
    }

    /// Tokens of a prompt that was admitted.
    pub(super) fn length(prompt: &Prompt) -> u32 {
        u32::try_from(prompt.len()).expect("at most max_model_len")
    }
}

/// What no step looks at but to start or end a request.
#[derive(Clone, Copy, Debug)]
struct Start {
    hit: u32,
    told: bool,
}

/// All running requests in order of admission, as columns.
///
/// Those whose prompt is done come first, since nobody starts beside a prompt that is part done; a decode
/// step moves all of them by one token. So their counts are kept relative to a clock of decode steps, and
/// a step moves the clock alone: what it costs is who ends and who needs a block, not who runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Lanes {
    rows: Vec<Row>,
    seats: Vec<u32>,
    prompts: Vec<u32>,
    ends: Vec<u32>,
    starts: Vec<Start>,
    /// Tokens computed by completed steps; of those that decode less the clock, modulo 2^32.
    counts: Vec<u32>,
    /// Tokens of planned steps, of those that do not decode yet.
    planned: Vec<u32>,
    /// Of how many the outputs must be told.
    told: usize,
    /// How many decode.
    decoding: usize,
    /// Decode steps completed.
    clock: u64,
    /// Decode steps planned.
    ahead: u32,
    /// The clock at which the first of those that decode ends.
    next_end: u64,
}

impl Lanes {
    pub(super) fn new() -> Self {
        // Debug builds, and so the tests, soon pass the place where 32 bits of the clock start anew.
        Self { clock: if cfg!(debug_assertions) { (1 << 32) - 64 } else { 0 }, ..Self::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn get(&self, at: usize) -> Lane {
        let decoding = at < self.decoding;
        let (end, computed, Start { hit, told }) = (self.ends[at], self.computed(at), self.starts[at]);
        Lane {
            row: self.rows[at],
            seat: self.seats[at],
            prompt: self.prompts[at],
            end,
            hit,
            computed,
            planned: if decoding { self.ahead.min(end - computed) } else { self.planned[at] },
            decoding,
            told,
        }
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = Lane> + Clone + '_ {
        self.iter_from(0)
    }

    /// Those from the position `first`.
    pub(super) fn iter_from(&self, first: usize) -> impl ExactSizeIterator<Item = Lane> + Clone + '_ {
        (first..self.len()).map(|at| self.get(at))
    }

    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub(super) fn seats(&self) -> &[u32] {
        &self.seats
    }

    pub(super) fn any_told(&self) -> bool {
        self.told > 0
    }

    pub(super) fn all_told(&self) -> bool {
        self.told == self.len()
    }

    /// Adds a request whose prompt is not done.
    pub(super) fn push(&mut self, lane: Lane) {
        let Lane { row, seat, prompt, end, hit, computed, planned, decoding, told } = lane;
        assert!(!decoding && computed < prompt, "a request starts with some of its prompt left");
        self.rows.push(row);
        self.seats.push(seat);
        self.prompts.push(prompt);
        self.ends.push(end);
        self.starts.push(Start { hit, told });
        self.counts.push(computed);
        self.planned.push(planned);
        self.told += usize::from(told);
    }

    /// Takes out those at the ascending positions `places`, and appends them to `gone`.
    pub(super) fn remove(&mut self, places: &[usize], gone: &mut Vec<Lane>) {
        fn close<T: Copy>(column: &mut Vec<T>, places: &[usize]) {
            for (closed, &at) in places.iter().enumerate() {
                let next = places.get(closed + 1).copied().unwrap_or(column.len());
                column.copy_within(at + 1..next, at - closed);
            }
            column.truncate(column.len() - places.len());
        }
        let mut first_gone = false;
        for &at in places {
            let lane = self.get(at);
            if at < self.decoding {
                first_gone |= self.clock + u64::from(lane.end - lane.computed) == self.next_end;
            }
            gone.push(lane);
        }
        self.decoding -= places.partition_point(|&at| at < self.decoding);
        close(&mut self.rows, places);
        close(&mut self.seats, places);
        close(&mut self.prompts, places);
        close(&mut self.ends, places);
        close(&mut self.starts, places);
        close(&mut self.counts, places);
        close(&mut self.planned, places);
        self.told -= gone[gone.len() - places.len()..].iter().filter(|lane| lane.told).count();
        if first_gone {
            self.find_next_end();
        }
    }

    /// Decode steps completed.
    pub(super) fn clock(&self) -> u64 {
        self.clock
    }

    /// The clock at which the next decode step is planned.
    pub(super) fn next_clock(&self) -> u64 {
        self.clock + u64::from(self.ahead)
    }

    /// How many decode.
    pub(super) fn decoding(&self) -> usize {
        self.decoding
    }

    /// How many will, once the planned steps have run.
    pub(super) fn decoding_then(&self) -> usize {
        (self.decoding..self.len()).rev().find(|&at| !self.is_prefilling(at)).map_or(self.decoding, |at| at + 1)
    }

    /// Whether some of the prompt of the newest request is left then.
    pub(super) fn last_prefilling(&self) -> bool {
        self.len().checked_sub(1).is_some_and(|last| last >= self.decoding && self.is_prefilling(last))
    }

    /// Whether one of the first `count` requests has emitted all it may then.
    pub(super) fn any_spent(&self, count: usize) -> bool {
        let spent = |at: usize| self.counts[at] + self.planned[at] == self.ends[at];
        self.next_end <= self.next_clock() || (self.decoding..count).any(spent)
    }

    /// Appends the positions of those that decode and have emitted all they may. They no longer count for the
    /// next end: they are to be taken out.
    pub(super) fn take_spent(&mut self, places: &mut Vec<usize>) {
        let clock = low(self.clock);
        let mut least = u32::MAX;
        for (at, (end, count)) in self.ends[..self.decoding].iter().zip(&self.counts[..self.decoding]).enumerate() {
            let left = end - count.wrapping_add(clock);
            if left == 0 {
                places.push(at);
            } else {
                least = least.min(left);
            }
        }
        self.next_end = self.clock + u64::from(least);
    }

    /// For how many steps, with none planned, all that decode can go on.
    pub(super) fn horizon(&self) -> u32 {
        u32::try_from(self.next_end - self.clock).unwrap_or(u32::MAX)
    }

    /// Computed tokens of the first `count` requests once the planned steps have run; none of them is spent.
    pub(super) fn projected(&self, count: usize) -> impl Iterator<Item = u32> + Clone + '_ {
        let clock = low(self.next_clock());
        let decoding = self.counts[..self.decoding].iter().map(move |computed| computed.wrapping_add(clock));
        let joining = self.counts[self.decoding..count].iter().zip(&self.planned[self.decoding..count]);
        decoding.chain(joining.map(|(computed, planned)| computed + planned))
    }

    /// Whether some of the prompt of each of the first `count` requests is left then.
    pub(super) fn prefilling(&self, count: usize) -> impl Iterator<Item = bool> + Clone + '_ {
        let clock = low(self.next_clock());
        let decoding = self.counts[..self.decoding].iter().zip(&self.prompts[..self.decoding]);
        // Both are below 2^31, and as signed numbers several are compared at a time.
        let left = move |(count, prompt): (&u32, &u32)| count.wrapping_add(clock).cast_signed() < prompt.cast_signed();
        let decoding = decoding.map(left);
        decoding.chain((self.decoding..count).map(|at| self.is_prefilling(at)))
    }

    /// Plans `tokens` more for the request at `at`, which does not decode.
    pub(super) fn plan(&mut self, at: usize, tokens: u32) {
        debug_assert!(at >= self.decoding, "those that decode are planned together");
        self.planned[at] += tokens;
    }

    /// Plans a decode step.
    pub(super) fn plan_decode(&mut self) {
        self.ahead += 1;
    }

    /// Forgets what was planned.
    pub(super) fn void(&mut self) {
        self.ahead = 0;
        self.planned[self.decoding..].fill(0);
    }

    /// Completes the decode step that is due, `times` times; whether anybody has now emitted all it may.
    pub(super) fn tick(&mut self, times: u32) -> bool {
        self.ahead -= 1;
        self.clock += u64::from(times);
        self.decoding > 0 && self.clock == self.next_end
    }

    /// Moves `tokens` of the prompt at `at` from planned to computed; whether the request has then emitted
    /// all it may.
    pub(super) fn advance(&mut self, at: usize, tokens: u32) -> bool {
        self.counts[at] += tokens;
        self.planned[at] -= tokens;
        self.counts[at] == self.ends[at]
    }

    /// Lets the oldest request that does not decode join those that do, if its prompt is done. Answers its
    /// seat, its computed tokens, and the clock at which it ends.
    pub(super) fn join(&mut self) -> Option<(u32, u32, u64)> {
        let at = self.decoding;
        let computed = *self.counts.get(at)?;
        if computed < self.prompts[at] {
            return None;
        }
        let end = self.clock + u64::from(self.ends[at] - computed);
        self.counts[at] = computed.wrapping_sub(low(self.clock));
        // A decode step that is planned already counts for all that decode.
        self.planned[at] = 0;
        self.next_end = if self.decoding == 0 { end } else { self.next_end.min(end) };
        self.decoding += 1;
        Some((self.seats[at], computed, end))
    }

    fn computed(&self, at: usize) -> u32 {
        let count = self.counts[at];
        if at < self.decoding { count.wrapping_add(low(self.clock)) } else { count }
    }

    /// Of a request that does not decode: whether some of its prompt is left once the planned steps have run.
    fn is_prefilling(&self, at: usize) -> bool {
        self.counts[at] + self.planned[at] < self.prompts[at]
    }

    fn find_next_end(&mut self) {
        let columns = self.ends[..self.decoding].iter().zip(&self.counts[..self.decoding]);
        let clock = low(self.clock);
        let left = columns.map(|(end, count)| end.wrapping_sub(count.wrapping_add(clock))).min();
        self.next_end = left.map_or(u64::MAX, |left| self.clock + u64::from(left));
    }
}

/// The clock, as counts are kept relative to it.
fn low(clock: u64) -> u32 {
    (clock & u64::from(u32::MAX)).try_into().expect("masked")
}
