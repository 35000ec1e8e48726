//! What a step would be: each row checked against what is known, and the shape found. Nothing is changed here.

use super::message::{Told, ToldRow, Who};
use super::plan::{Plan, Planned};
use super::state::Worker;
use crate::decide::{Kind, check_step};
use crate::error::{Error, Fault};
use crate::fill::{Seen, Shape};
use crate::request::{Row, TOKENS_MAX, UNKNOWN_TOKEN};

/// What a request will be once the step is committed, as far as checks need it.
struct View<'a> {
    tokens: &'a [u32],
    prompt: i64,
    /// Tokens that the scheduler counts, those that are still being sampled included.
    counted: i64,
    /// Length of the table.
    blocks: usize,
}

impl Worker {
    /// Checks a step and finds its shape; `bucket` asks for a context bucket of a decode. `name` names a row in an
    /// [`Error::Violation`], which is a step of two kinds or beyond its padding. Nothing that is known changes.
    pub fn plan<N: std::fmt::Display>(
        &mut self,
        told: &Told,
        bucket: Option<i64>,
        name: impl Fn(usize) -> N,
    ) -> Result<Plan, Error> {
        let kind = if told.num_seqs_padded == 0 { Kind::Prefill } else { Kind::Decode };
        let padded = self.padded(kind, told)?;
        let mut finished = told.finished.clone();
        finished.sort_unstable();
        let mut seen = std::mem::take(&mut self.seen);
        let read = told.rows.iter().enumerate().map(|(at, row)| {
            let view = self.view(row, &finished, &mut seen);
            view.and_then(|view| self.row(kind, row, &view)).map_err(|fault| Error::Row { at, fault })
        });
        let read: Result<(Vec<_>, Vec<_>), _> = read.collect();
        self.seen = seen;
        let (rows, flags) = read?;
        check_step(kind, padded, 1, flags.iter().copied(), name)?;
        let shape = if kind == Kind::Prefill {
            self.layout.prefill(rows.len(), rows.iter().map(|row| u64::from(row.end - row.start)).sum())?;
            Shape::Prefill { tokens: padded }
        } else {
            let context = rows.iter().map(|row| u64::from(row.end)).max().unwrap_or(0);
            Shape::Decode { rows: padded, context: self.layout.context(context, bucket)? }
        };
        let total = rows.iter().map(|row| row.end - row.start).sum();
        Ok(Plan { shape, total, rows })
    }

    /// The compiled size that the scheduler has chosen.
    fn padded(&self, kind: Kind, told: &Told) -> Result<u32, Error> {
        if told.rows.is_empty() {
            return Err(Error::invalid("num_scheduled_tokens", "none", "at least one request"));
        }
        let (field, size, sizes) = if kind == Kind::Prefill {
            let sum = told.rows.iter().fold(0_i64, |sum, row| sum.saturating_add(row.padded));
            ("num_scheduled_tokens_padded", sum, self.layout.token_buckets())
        } else {
            ("num_seqs_padded", told.num_seqs_padded, self.layout.seqs_buckets())
        };
        let found = u32::try_from(size).ok().filter(|size| sizes.contains(size));
        found.ok_or_else(|| {
            if kind == Kind::Prefill {
                Error::invalid(field, format!("{size} in all"), format!("a sum of one of {sizes:?}"))
            } else {
                Error::invalid(field, size, format!("one of {sizes:?}"))
            }
        })
    }

    /// The request as the step would leave it.
    fn view<'a>(&'a self, told: &'a ToldRow, finished: &[Row], seen: &mut Seen) -> Result<View<'a>, Fault> {
        let find = |row| {
            let found = self.requests.get(row).filter(|_| finished.binary_search(&row).is_err());
            found
                .ok_or_else(|| Fault::new("request", "unknown", "one that was told before, and not told to have ended"))
        };
        let mut check_blocks = |before: &[u32]| self.layout.check_blocks(before.iter().chain(&told.blocks), seen);
        match &told.who {
            Who::New { tokens, prompt, .. } => {
                self.check_tokens("prompt_token_ids", tokens)?;
                if *prompt > tokens.len() {
                    let expected = format!("at least the {prompt} of the prompt");
                    return Err(Fault::new("prefill_token_ids", format!("{} ids", tokens.len()), expected));
                }
                check_blocks(&[])?;
                let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
                Ok(View { tokens, prompt: count(*prompt), counted: count(tokens.len()), blocks: told.blocks.len() })
            }
            &Who::Known { row, outputs } => {
                let request = find(row)?;
                if !told.blocks.is_empty() {
                    check_blocks(&request.blocks)?;
                }
                let (prompt, counted) = request.count(outputs)?;
                let blocks = request.blocks.len() + told.blocks.len();
                Ok(View { tokens: &request.tokens, prompt, counted, blocks })
            }
            Who::Resumed { row, outputs, tokens } => {
                let request = find(*row)?;
                self.check_tokens("all_token_ids", tokens)?;
                check_blocks(&[])?;
                let (prompt, counted) = request.count(*outputs)?;
                Ok(View { tokens, prompt, counted, blocks: told.blocks.len() })
            }
        }
    }

    /// What a row computes; and, for the rules of a step, whether it has prompt tokens left, and its count.
    fn row(&self, kind: Kind, told: &ToldRow, view: &View<'_>) -> Result<(Planned, (bool, i64)), Fault> {
        let &ToldRow { computed, count, padded, .. } = told;
        let &View { tokens, prompt, counted, blocks } = view;
        if !(0..counted).contains(&computed) {
            let expected = format!("0 to {}, one below the tokens that there are", counted - 1);
            return Err(Fault::new("num_computed_tokens", computed, expected));
        }
        // A prompt whose last token alone is left may run in either step: from elsewhere it comes as a decode.
        let (prefill, wrong, expected) = match kind {
            Kind::Prefill => (computed < prompt.max(counted - 1), padded < count, "at least"),
            Kind::Decode | Kind::Idle => (computed < counted - 1, padded != count, "the real count,"),
        };
        if wrong {
            return Err(Fault::new("num_scheduled_tokens_padded", padded, format!("{expected} {count}")));
        }
        if count > counted - computed {
            let expected = format!("at most the {} that are left", counted - computed);
            return Err(Fault::new("num_scheduled_tokens", count, expected));
        }
        // A count below 1 is refused with the others of its step.
        let end = computed + count.max(1);
        self.layout.check_positions(u64::try_from(end).unwrap_or(0), blocks)?;
        let position = |at: i64| u32::try_from(at).unwrap_or(TOKENS_MAX);
        let (start, end) = (position(computed), position(end));
        if prefill && kind == Kind::Prefill && tokens.len() < end as usize {
            let value = format!("none at position {}", tokens.len());
            return Err(Fault::new("token_ids", value, "those of a prefill known"));
        }
        let token = tokens.get(start as usize).copied().unwrap_or(UNKNOWN_TOKEN);
        Ok((Planned { start, end, emits: i64::from(end) == counted, token }, (prefill, count)))
    }

    pub(super) fn check_tokens(&self, field: &'static str, tokens: &[u32]) -> Result<(), Fault> {
        if let Some(wrong) = tokens.iter().find(|&&token| token > TOKENS_MAX) {
            return Err(Fault::new(field, wrong, format!("token ids from 0 to {TOKENS_MAX}")));
        }
        self.layout.check_tokens(tokens).map_err(|fault| Fault { field, ..fault })
    }
}
