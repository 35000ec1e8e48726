//! The running requests as every step looks at them.

use crate::request::{Prompt, Row};

/// One running request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) row: Row,
    pub(super) prompt: u32,
    /// Computed tokens with which it ends by length: the last output is never computed.
    pub(super) end: u32,
    /// Tokens that were computed before it started: it shares their blocks.
    pub(super) hit: u32,
    /// Tokens computed by completed steps.
    pub(super) computed: u32,
    /// Tokens of planned steps.
    pub(super) planned: u32,
    /// KV slots of its blocks.
    pub(super) capacity: u32,
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

/// All running requests in order of admission, as columns: a decode step moves a few counts of every
/// request, and over columns those loops run several requests at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct Lanes {
    rows: Vec<Row>,
    prompts: Vec<u32>,
    ends: Vec<u32>,
    hits: Vec<u32>,
    computed: Vec<u32>,
    planned: Vec<u32>,
    capacity: Vec<u32>,
    told: Vec<bool>,
    /// How many of them must be told.
    told_count: usize,
}

impl Lanes {
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn get(&self, at: usize) -> Lane {
        Lane {
            row: self.rows[at],
            prompt: self.prompts[at],
            end: self.ends[at],
            hit: self.hits[at],
            computed: self.computed[at],
            planned: self.planned[at],
            capacity: self.capacity[at],
            told: self.told[at],
        }
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = Lane> + ExactSizeIterator + Clone + '_ {
        self.iter_from(0)
    }

    /// Those from the position `first`.
    pub(super) fn iter_from(
        &self,
        first: usize,
    ) -> impl DoubleEndedIterator<Item = Lane> + ExactSizeIterator + Clone + '_ {
        (first..self.len()).map(|at| self.get(at))
    }

    /// Whether some of the prompt of the request at `at` is left once the planned steps have run.
    fn is_prefilling(&self, at: usize) -> bool {
        self.computed[at] + self.planned[at] < self.prompts[at]
    }

    /// Whether the newest request is so.
    pub(super) fn last_prefilling(&self) -> bool {
        self.len().checked_sub(1).is_some_and(|last| self.is_prefilling(last))
    }

    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub(super) fn any_told(&self) -> bool {
        self.told_count > 0
    }

    pub(super) fn push(&mut self, lane: Lane) {
        let Lane { row, prompt, end, hit, computed, planned, capacity, told } = lane;
        self.rows.push(row);
        self.prompts.push(prompt);
        self.ends.push(end);
        self.hits.push(hit);
        self.computed.push(computed);
        self.planned.push(planned);
        self.capacity.push(capacity);
        self.told.push(told);
        self.told_count += usize::from(told);
    }

    pub(super) fn remove(&mut self, at: usize) -> Lane {
        self.told_count -= usize::from(self.told[at]);
        Lane {
            row: self.rows.remove(at),
            prompt: self.prompts.remove(at),
            end: self.ends.remove(at),
            hit: self.hits.remove(at),
            computed: self.computed.remove(at),
            planned: self.planned.remove(at),
            capacity: self.capacity.remove(at),
            told: self.told.remove(at),
        }
    }

    /// Takes out those at the ascending positions `gone`, in one pass.
    pub(super) fn remove_all(&mut self, gone: &[usize]) -> Vec<Lane> {
        fn close<T: Copy>(column: &mut Vec<T>, gone: &[usize]) {
            for (closed, &at) in gone.iter().enumerate() {
                let next = gone.get(closed + 1).copied().unwrap_or(column.len());
                column.copy_within(at + 1..next, at - closed);
            }
            column.truncate(column.len() - gone.len());
        }
        let lanes: Vec<Lane> = gone.iter().map(|&at| self.get(at)).collect();
        self.told_count -= lanes.iter().filter(|lane| lane.told).count();
        close(&mut self.rows, gone);
        close(&mut self.prompts, gone);
        close(&mut self.ends, gone);
        close(&mut self.hits, gone);
        close(&mut self.computed, gone);
        close(&mut self.planned, gone);
        close(&mut self.capacity, gone);
        close(&mut self.told, gone);
        lanes
    }

    /// Number of requests in front whose prompt is done once the planned steps have run: prompts that are
    /// part done are the newest, since nobody starts beside them.
    pub(super) fn decoding(&self) -> usize {
        (0..self.len()).rev().find(|&at| !self.is_prefilling(at)).map_or(0, |at| at + 1)
    }

    /// Plans `tokens` more for the request at `at`.
    pub(super) fn plan(&mut self, at: usize, tokens: u32) {
        self.planned[at] += tokens;
    }

    /// Row, computed tokens once the planned steps have run, and KV slots of the request at `at`.
    pub(super) fn slots(&self, at: usize) -> (Row, u32, u32) {
        (self.rows[at], self.computed[at] + self.planned[at], self.capacity[at])
    }

    /// Gives the request at `at` `slots` more.
    pub(super) fn widen(&mut self, at: usize, slots: u32) {
        self.capacity[at] += slots;
    }

    /// Moves `tokens` of the request at `at` from planned to computed; whether it has emitted all it may.
    pub(super) fn advance(&mut self, at: usize, tokens: u32) -> bool {
        self.computed[at] += tokens;
        self.planned[at] -= tokens;
        self.computed[at] == self.ends[at]
    }

    /// Forgets what was planned.
    pub(super) fn void(&mut self) {
        self.planned.fill(0);
    }

    /// Computed tokens of the first `count` requests once the planned steps have run.
    pub(super) fn projected(&self, count: usize) -> impl ExactSizeIterator<Item = u32> + Clone + '_ {
        self.computed[..count].iter().zip(&self.planned[..count]).map(|(computed, planned)| computed + planned)
    }

    /// Whether some of the prompt of each of the first `count` requests is left then.
    pub(super) fn prefilling(&self, count: usize) -> impl Iterator<Item = bool> + Clone + '_ {
        self.projected(count).zip(&self.prompts[..count]).map(|(projected, &prompt)| projected < prompt)
    }

    /// The fewest tokens that any of the first `count` requests, whose prompts are done, may still decode
    /// then: for how many steps all of them can go on.
    pub(super) fn least_left(&self, count: usize) -> u32 {
        self.projected(count).zip(&self.ends[..count]).map(|(projected, end)| end - projected).min().unwrap_or(0)
    }

    /// Plans a token for each of the first `count` requests that may still decode one.
    pub(super) fn plan_ready(&mut self, count: usize) {
        let columns = self.computed[..count].iter().zip(&self.ends[..count]).zip(&mut self.planned[..count]);
        for ((&computed, &end), planned) in columns {
            *planned += u32::from(computed + *planned != end);
        }
    }

    /// As [`Lanes::plan`] for the first `count` requests.
    pub(super) fn plan_front(&mut self, count: usize, tokens: u32) {
        for planned in &mut self.planned[..count] {
            *planned += tokens;
        }
    }

    /// As [`Lanes::advance`] for the first `count` requests; the positions of those that have emitted all
    /// they may.
    pub(super) fn advance_front(&mut self, count: usize, tokens: u32) -> impl Iterator<Item = usize> + '_ {
        for computed in &mut self.computed[..count] {
            *computed += tokens;
        }
        for planned in &mut self.planned[..count] {
            *planned -= tokens;
        }
        let ends = self.ends[..count].iter().zip(&self.computed[..count]);
        // Most steps end nobody: counted first, which runs over several requests at a time.
        let any = ends.clone().map(|(end, computed)| u32::from(end == computed)).sum::<u32>() > 0;
        let done = ends.enumerate().filter(|&(_, (end, computed))| end == computed).map(|(at, _)| at);
        any.then_some(done).into_iter().flatten()
    }

    /// The first request from `from` to `to` whose planned tokens, and `lookahead` more, need more slots than
    /// it has.
    pub(super) fn short_of_slots(&self, from: usize, to: usize, lookahead: u32) -> Option<usize> {
        let columns = self.computed[from..to].iter().zip(&self.planned[from..to]).zip(&self.capacity[from..to]);
        let mut short = columns.map(|((computed, planned), capacity)| computed + planned + lookahead > *capacity);
        short.position(|short| short).map(|at| from + at)
    }
}
