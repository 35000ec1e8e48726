//! A checked step: its shape and its rows.

use crate::fill::Shape;
use crate::request::UNKNOWN_TOKEN;

/// What `Worker::plan` found a step to be.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) shape: Shape,
    /// Real tokens of a prefill, rows of a decode.
    pub(super) total: u32,
    pub(super) rows: Vec<Planned>,
}

/// One row of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    pub(super) start: u32,
    pub(super) end: u32,
    /// It computes the last token that there is, so one more is sampled.
    pub(super) emits: bool,
    /// The first one that it computes; unknown where that is still being sampled.
    pub(super) token: u32,
}

impl Plan {
    /// The compiled shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Real tokens of a prefill, real rows of a decode.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Of each row, whether it emits a token; a chunk in the middle of a prompt does not.
    pub fn emits(&self) -> impl Iterator<Item = bool> + '_ {
        self.rows.iter().map(|row| row.emits)
    }

    /// Places of the rows whose token is not known. Those of a prefill always are.
    pub fn unknown(&self) -> impl Iterator<Item = usize> + '_ {
        let unknown = |(at, row): (usize, &Planned)| (row.token == UNKNOWN_TOKEN).then_some(at);
        self.rows.iter().enumerate().filter_map(unknown)
    }
}
