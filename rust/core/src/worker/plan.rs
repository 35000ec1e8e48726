//! A checked step: its shape and its rows.

use crate::fill::Shape;
use crate::request::UNKNOWN_TOKEN;

/// The result of `Worker::plan`: a checked step.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) shape: Shape,
    /// Number of unpadded tokens of a prefill, or of unpadded rows of a decode.
    pub(super) total: u32,
    pub(super) rows: Vec<Planned>,
}

/// One row of a plan: the positions from `start` to `end` of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    pub(super) start: u32,
    pub(super) end: u32,
    /// Whether the row computes the request's last token, so that a token is sampled.
    pub(super) emits: bool,
    /// Token at `start`; unknown while the step that samples it is in flight.
    pub(super) token: u32,
}

impl Plan {
    /// Return the compiled shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Return the number of unpadded tokens of a prefill, or of unpadded rows of a decode.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Return, for each row, whether it emits a token. A chunk that does not end its prompt emits none.
    pub fn emits(&self) -> impl Iterator<Item = bool> + '_ {
        self.rows.iter().map(|row| row.emits)
    }

    /// Return the batch positions of the rows with an unknown token. The tokens of a prefill are known.
    pub fn unknown(&self) -> impl Iterator<Item = usize> + '_ {
        let unknown = |(at, row): (usize, &Planned)| (row.token == UNKNOWN_TOKEN).then_some(at);
        self.rows.iter().enumerate().filter_map(unknown)
    }
}
