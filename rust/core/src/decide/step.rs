//! A step as a value: its requests, their token counts, the padded size, and the requests that ended before it.

use std::fmt;

use super::phase::Kind;
use crate::error::Error;
use crate::request::Row;

/// One planned step. It never changes once the caller has it.
#[derive(Clone, Debug, Default)]
pub struct Step {
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    pub(crate) rows: Vec<Row>,
    /// Batch slot of each row, valid while the request of the row is alive.
    pub(crate) slots: Vec<u32>,
    /// Tokens of each row computed before the step.
    pub(crate) computed: Vec<u32>,
    /// Chunk of each row; empty for a decode step, in which each row has one token.
    pub(crate) chunks: Vec<Chunk>,
    /// Compiled size: prompt tokens of a prefill step, rows of a decode step.
    pub(crate) padded: u32,
    pub(crate) finished: Vec<Row>,
}

/// The part of one prompt that a prefill step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) tokens: u32,
    /// Whether the chunk has the last prompt token, so that the row emits a token.
    pub(crate) last: bool,
}

impl Step {
    /// Id of the step, unique within its scheduler.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Kind of the step.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Requests of the step, in batch order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Whether every row has one token and no padding.
    pub fn is_uniform(&self) -> bool {
        self.kind != Kind::Prefill
    }

    /// Unpadded token count of the row at `at`.
    pub fn tokens(&self, at: usize) -> u32 {
        self.chunks.get(at).map_or(1, |chunk| chunk.tokens)
    }

    /// Padded token count of the row at `at`. The last row of a prefill step carries all padding, so that the counts
    /// add up to the token bucket. Decode rows are not padded.
    pub fn padded(&self, at: usize) -> u32 {
        let tokens = self.tokens(at);
        if self.kind == Kind::Prefill && at + 1 == self.rows.len() { tokens + self.padding() } else { tokens }
    }

    /// Number of tokens of the row at `at` computed before the step.
    pub fn computed(&self, at: usize) -> u32 {
        self.computed[at]
    }

    /// Whether the row at `at` emits a token: every decode row does, and so does the last chunk of a prompt.
    pub fn emits(&self, at: usize) -> bool {
        self.chunks.get(at).is_none_or(|chunk| chunk.last)
    }

    /// Unpadded token count of all rows.
    pub fn total(&self) -> u32 {
        match self.kind {
            Kind::Prefill => self.chunks.iter().map(|chunk| chunk.tokens).sum(),
            Kind::Decode | Kind::Idle => u32::try_from(self.rows.len()).expect("rows are counted in 32 bits"),
        }
    }

    /// Compiled size: the token bucket of a prefill step, the batch bucket of a decode step, 0 for an idle step.
    pub fn padded_tokens(&self) -> u32 {
        self.padded
    }

    /// Batch bucket of a decode step, in rows; 0 for other steps.
    pub fn num_seqs_padded(&self) -> u32 {
        if self.kind == Kind::Decode { self.padded } else { 0 }
    }

    /// Requests that ended since the last completed step.
    pub fn finished(&self) -> &[Row] {
        &self.finished
    }

    fn padding(&self) -> u32 {
        self.padded - self.total()
    }

    pub(crate) fn clear(&mut self) {
        self.kind = Kind::Idle;
        self.rows.clear();
        self.slots.clear();
        self.computed.clear();
        self.chunks.clear();
        self.padded = 0;
        self.finished.clear();
    }
}

/// Check that a compiled graph can run a step: all rows are of the step's kind, every count is at least 1, no decode
/// row has more than `width` tokens, and the total is at most `padded`.
///
/// `rows` gives for each row whether it is prefilling, and its unpadded token count. `padded` counts tokens of a
/// prefill step and rows of a decode step. Returns [`Error::BadStep`] with the `name` of the request at a position.
pub fn check_step<N: fmt::Display>(
    kind: Kind,
    padded: u32,
    width: i64,
    rows: impl Iterator<Item = (bool, i64)> + Clone,
    name: impl Fn(usize) -> N,
) -> Result<(), Error> {
    let wrong = |(prefill, count): (bool, i64)| match kind {
        Kind::Prefill => !prefill || count < 1,
        Kind::Decode => prefill || !(1..=width).contains(&count),
        Kind::Idle => true,
    };
    // Counting vectorises, searching does not, and a bad row is rare.
    if rows.clone().map(|row| u32::from(wrong(row))).sum::<u32>() > 0 {
        let found = rows.clone().enumerate().find(|&(_, row)| wrong(row));
        let (at, (prefill, count)) = found.expect("a bad row was counted");
        return Err(bad_row(kind, width, prefill, count, &name(at)));
    }
    let total: i64 = if kind == Kind::Decode { rows.map(|_| 1).sum() } else { rows.map(|(_, count)| count).sum() };
    if total > i64::from(padded) {
        let unit = if kind == Kind::Decode { "rows" } else { "tokens" };
        let (kind, name) = (kind.name(), name(0));
        let expected = format!("at most {padded}, the padded size");
        let text = format!("{kind} step that starts with request {name}: {total} {unit}: expected {expected}");
        return Err(Error::BadStep(text));
    }
    Ok(())
}

/// Return the error of a row of the wrong kind or with a bad count.
fn bad_row(kind: Kind, width: i64, prefill: bool, count: i64, name: &dyn fmt::Display) -> Error {
    let phase = if prefill { "prefilling" } else { "decoding" };
    let expected = match kind {
        Kind::Prefill => "prefilling requests with at least 1 token each".to_owned(),
        Kind::Decode if width == 1 => "decoding requests with 1 token each".to_owned(),
        Kind::Decode => format!("decoding requests with 1 to {width} tokens each"),
        Kind::Idle => "no requests".to_owned(),
    };
    let kind = kind.name();
    Error::BadStep(format!("{kind} step: {count} tokens of {phase} request {name}: expected {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_step_is_reported_with_its_request_and_counts() {
        let check = |kind, padded, rows: &[(bool, i64)]| {
            check_step(kind, padded, 1, rows.iter().copied(), |at| ["a", "b"][at]).map_err(|error| error.to_string())
        };
        assert_eq!(check(Kind::Prefill, 128, &[(true, 60), (true, 68)]), Ok(()));
        assert_eq!(check(Kind::Decode, 2, &[(false, 1), (false, 1)]), Ok(()));
        assert_eq!(
            check(Kind::Prefill, 128, &[(true, 60), (false, 1)]),
            Err("prefill step: 1 tokens of decoding request b: \
                 expected prefilling requests with at least 1 token each"
                .into())
        );
        for count in [0, 2] {
            let text = format!(
                "decode step: {count} tokens of decoding request a: expected decoding requests with 1 token each"
            );
            assert_eq!(check(Kind::Decode, 2, &[(false, count)]), Err(text));
        }
        assert_eq!(
            check(Kind::Prefill, 64, &[(true, 65)]),
            Err("prefill step that starts with request a: 65 tokens: expected at most 64, the padded size".into())
        );
    }

    #[test]
    fn the_last_row_carries_the_padding() {
        let mut slab = crate::request::Slab::default();
        let chunk = |tokens| Chunk { tokens, last: true };
        let step = Step {
            kind: Kind::Prefill,
            rows: vec![slab.insert(()), slab.insert(())],
            chunks: vec![chunk(50), chunk(20)],
            padded: 128,
            ..Step::default()
        };
        assert_eq!((step.padded(0), step.padded(1), step.total(), step.num_seqs_padded()), (50, 78, 70, 0));
    }
}
