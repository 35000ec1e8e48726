//! A step as a value: who runs, how many tokens each, padded to what, and who ended before it.

use super::phase::Kind;
use crate::error::Error;
use crate::request::Row;

/// One planned step. It never changes once it was handed out.
#[derive(Clone, Debug, Default)]
pub struct Step {
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    pub(crate) rows: Vec<Row>,
    /// Where the scheduler keeps what belongs to each row, as long as the row is alive.
    pub(crate) seats: Vec<u32>,
    /// Tokens computed before the step, by row.
    pub(crate) computed: Vec<u32>,
    /// Prompt tokens of each row; empty for a decode step, where each row has one token.
    pub(crate) chunks: Vec<Chunk>,
    /// The compiled size: prompt tokens of a prefill, rows of a decode.
    pub(crate) padded: u32,
    pub(crate) finished: Vec<Row>,
}

/// The share of one prompt in a prefill step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) tokens: u32,
    /// It computes the last prompt token, so the row emits.
    pub(crate) last: bool,
}

impl Step {
    /// Number of the step within its scheduler; no two are equal.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What it does.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Who runs, in batch order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Whether every row has one token, unpadded.
    pub fn is_uniform(&self) -> bool {
        self.kind != Kind::Prefill
    }

    /// Tokens of the row at `at`: real ones, never padding.
    pub fn tokens(&self, at: usize) -> u32 {
        self.chunks.get(at).map_or(1, |chunk| chunk.tokens)
    }

    /// Tokens of the row at `at` with padding. The values add up to the bucket of a prefill: the last
    /// row carries all of its padding. A decode row is never padded.
    pub fn padded(&self, at: usize) -> u32 {
        let real = self.tokens(at);
        if self.kind == Kind::Prefill && at + 1 == self.rows.len() { real + self.padding() } else { real }
    }

    /// Tokens of the row at `at` that were computed before the step.
    pub fn computed(&self, at: usize) -> u32 {
        self.computed[at]
    }

    /// Whether the row at `at` emits a token: every decode does, and the last chunk of a prompt.
    pub fn emits(&self, at: usize) -> bool {
        self.chunks.get(at).is_none_or(|chunk| chunk.last)
    }

    /// Real tokens of all rows.
    pub fn total(&self) -> u32 {
        match self.kind {
            Kind::Prefill => self.chunks.iter().map(|chunk| chunk.tokens).sum(),
            Kind::Decode | Kind::Idle => u32::try_from(self.rows.len()).expect("rows are counted in 32 bits"),
        }
    }

    /// The compiled size: the token bucket of a prefill, the batch bucket of a decode, 0 when idle.
    pub fn padded_tokens(&self) -> u32 {
        self.padded
    }

    /// The batch bucket of a decode; 0 otherwise.
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
        self.seats.clear();
        self.computed.clear();
        self.chunks.clear();
        self.padded = 0;
        self.finished.clear();
    }
}

/// What a step may not break, whoever planned it: one phase only, no count below 1, a decode row no wider
/// than `width`, no padded total below the real one. `rows` gives for each row whether it has prompt tokens
/// left, and its real count. The padded size of a decode counts rows.
pub fn check_step<N: std::fmt::Display>(
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
    // Counted first, which runs over several rows at a time; searched for only when there is one.
    if rows.clone().map(|row| u32::from(wrong(row))).sum::<u32>() > 0 {
        let found = rows.clone().enumerate().find(|&(_, row)| wrong(row));
        let (at, (prefill, count)) = found.expect("one was counted");
        let row = if prefill { "prefill" } else { "decode" };
        let what = format!("a {} step holds {row} {} with {count} tokens", kind.name(), name(at));
        return Err(Error::Violation(what));
    }
    let total: i64 = if kind == Kind::Decode { rows.map(|_| 1).sum() } else { rows.map(|(_, count)| count).sum() };
    if total > i64::from(padded) {
        let unit = if kind == Kind::Decode { "rows" } else { "tokens" };
        let what = format!("a {} step of {total} {unit}, {} first, is padded to {padded}", kind.name(), name(0));
        return Err(Error::Violation(what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn violations_name_who_and_how_many() {
        let check = |kind, padded, rows: &[(bool, i64)]| {
            check_step(kind, padded, 1, rows.iter().copied(), |at| ["a", "b"][at]).map_err(|error| error.to_string())
        };
        assert_eq!(check(Kind::Prefill, 128, &[(true, 60), (true, 68)]), Ok(()));
        assert_eq!(check(Kind::Decode, 2, &[(false, 1), (false, 1)]), Ok(()));
        assert_eq!(
            check(Kind::Prefill, 128, &[(true, 60), (false, 1)]),
            Err("a prefill step holds decode b with 1 tokens".into())
        );
        assert_eq!(check(Kind::Decode, 2, &[(false, 0)]), Err("a decode step holds decode a with 0 tokens".into()));
        assert_eq!(check(Kind::Decode, 2, &[(false, 2)]), Err("a decode step holds decode a with 2 tokens".into()));
        assert_eq!(
            check(Kind::Prefill, 64, &[(true, 65)]),
            Err("a prefill step of 65 tokens, a first, is padded to 64".into())
        );
    }

    #[test]
    fn the_last_row_carries_the_padding() {
        let mut slab = crate::request::Rows::default();
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
