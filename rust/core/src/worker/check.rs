//! The check of a step: each row against the known requests, then the shape. No state changes here.

use super::plan::{Plan, Planned};
use super::scheduled::{RequestUpdate, ScheduledRow, ScheduledStep};
use super::state::Worker;
use crate::decide::{Kind, check_step};
use crate::error::{Error, Fault};
use crate::fill::{Seen, Shape};
use crate::request::{Row, TOKENS_MAX, UNKNOWN_TOKEN};

/// The part of a request's state after the step that the checks need.
struct View<'a> {
    /// Known tokens.
    tokens: &'a [u32],
    /// Number of prompt tokens.
    prompt: i64,
    /// Number of tokens that the scheduler counts, including those still being sampled.
    counted: i64,
    /// Number of KV blocks.
    blocks: usize,
}

impl Worker {
    /// Check a step and return its plan. No request changes.
    ///
    /// `bucket` overrides the context bucket of a decode step. `name` returns the name of a row for an
    /// [`Error::BadStep`]: a step that mixes prefill and decode rows, or exceeds its padded count.
    pub fn plan<N: std::fmt::Display>(
        &mut self,
        step: &ScheduledStep,
        bucket: Option<i64>,
        name: impl Fn(usize) -> N,
    ) -> Result<Plan, Error> {
        let kind = if step.num_seqs_padded == 0 { Kind::Prefill } else { Kind::Decode };
        let padded = self.padded(kind, step)?;
        let mut finished = step.finished.clone();
        finished.sort_unstable();
        let mut seen = std::mem::take(&mut self.seen);
        let checked = step.rows.iter().enumerate().map(|(at, row)| {
            let view = self.view(row, &finished, &mut seen);
            view.and_then(|view| self.row(kind, row, &view)).map_err(|fault| Error::Row { at, fault })
        });
        let checked: Result<(Vec<_>, Vec<_>), _> = checked.collect();
        self.seen = seen;
        let (rows, flags) = checked?;
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

    /// Return the token bucket or batch bucket that the scheduler has chosen.
    fn padded(&self, kind: Kind, step: &ScheduledStep) -> Result<u32, Error> {
        if step.rows.is_empty() {
            return Err(Error::invalid("num_scheduled_tokens", "none", "at least one request"));
        }
        let (field, size, sizes) = if kind == Kind::Prefill {
            let sum = step.rows.iter().fold(0_i64, |sum, row| sum.saturating_add(row.padded));
            ("num_scheduled_tokens_padded", sum, self.layout.token_buckets())
        } else {
            ("num_seqs_padded", step.num_seqs_padded, self.layout.seqs_buckets())
        };
        let found = u32::try_from(size).ok().filter(|size| sizes.contains(size));
        found.ok_or_else(|| {
            if kind == Kind::Prefill {
                Error::invalid(field, format!("{size} in total"), format!("a sum that is one of {sizes:?}"))
            } else {
                Error::invalid(field, size, format!("one of {sizes:?}"))
            }
        })
    }

    /// Return the request's state as the step would leave it. `finished` is sorted.
    fn view<'a>(&'a self, scheduled: &'a ScheduledRow, finished: &[Row], seen: &mut Seen) -> Result<View<'a>, Fault> {
        let find = |row| {
            let found = self.requests.get(row).filter(|_| finished.binary_search(&row).is_err());
            found.ok_or_else(|| Fault::new("request", "unknown", "a request of an earlier step that has not finished"))
        };
        let mut check_blocks = |before: &[u32]| self.layout.check_blocks(before.iter().chain(&scheduled.blocks), seen);
        match &scheduled.update {
            RequestUpdate::New { tokens, prompt, .. } => {
                self.check_tokens("prompt_token_ids", tokens)?;
                if *prompt > tokens.len() {
                    let expected = format!("at least the {prompt} prompt tokens");
                    return Err(Fault::new("prefill_token_ids", format!("{} ids", tokens.len()), expected));
                }
                check_blocks(&[])?;
                let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
                let blocks = scheduled.blocks.len();
                Ok(View { tokens, prompt: count(*prompt), counted: count(tokens.len()), blocks })
            }
            &RequestUpdate::Known { row, outputs } => {
                let request = find(row)?;
                if !scheduled.blocks.is_empty() {
                    check_blocks(&request.blocks)?;
                }
                let (prompt, counted) = request.count(outputs)?;
                let blocks = request.blocks.len() + scheduled.blocks.len();
                Ok(View { tokens: &request.tokens, prompt, counted, blocks })
            }
            RequestUpdate::Resumed { row, outputs, tokens } => {
                let request = find(*row)?;
                self.check_tokens("all_token_ids", tokens)?;
                check_blocks(&[])?;
                let (prompt, counted) = request.count(*outputs)?;
                Ok(View { tokens, prompt, counted, blocks: scheduled.blocks.len() })
            }
        }
    }

    /// Return the planned row and, for [`check_step`], whether it has prompt tokens left, and its count.
    fn row(&self, kind: Kind, scheduled: &ScheduledRow, view: &View<'_>) -> Result<(Planned, (bool, i64)), Fault> {
        let &ScheduledRow { computed, count, padded, .. } = scheduled;
        let &View { tokens, prompt, counted, blocks } = view;
        if !(0..counted).contains(&computed) {
            let expected = format!("0 to {}, less than the {counted} tokens of the request", counted - 1);
            return Err(Fault::new("num_computed_tokens", computed, expected));
        }
        // A prompt with one token left may run in a step of either kind: after a remote KV load, vLLM schedules that
        // token as a decode.
        let (prefill, wrong, expected) = match kind {
            Kind::Prefill => (computed < prompt.max(counted - 1), padded < count, "at least"),
            Kind::Decode | Kind::Idle => (computed < counted - 1, padded != count, "the unpadded count,"),
        };
        if wrong {
            return Err(Fault::new("num_scheduled_tokens_padded", padded, format!("{expected} {count}")));
        }
        if count > counted - computed {
            let expected = format!("at most the {} remaining tokens", counted - computed);
            return Err(Fault::new("num_scheduled_tokens", count, expected));
        }
        // `check_step` refuses a count below 1.
        let end = computed + count.max(1);
        self.layout.check_positions(u64::try_from(end).unwrap_or(0), blocks)?;
        let position = |at: i64| u32::try_from(at).unwrap_or(TOKENS_MAX);
        let (start, end) = (position(computed), position(end));
        if prefill && kind == Kind::Prefill && tokens.len() < end as usize {
            let value = format!("none at position {}", tokens.len());
            return Err(Fault::new("token_ids", value, "a known token at every position of a prefill"));
        }
        let token = tokens.get(start as usize).copied().unwrap_or(UNKNOWN_TOKEN);
        Ok((Planned { start, end, emits: i64::from(end) == counted, token }, (prefill, count)))
    }

    /// Check token ids against 32 bits and the vocabulary; `field` is the name in the fault.
    pub(super) fn check_tokens(&self, field: &'static str, tokens: &[u32]) -> Result<(), Fault> {
        if let Some(wrong) = tokens.iter().find(|&&token| token > TOKENS_MAX) {
            return Err(Fault::new(field, wrong, format!("token ids from 0 to {TOKENS_MAX}")));
        }
        self.layout.check_tokens(tokens).map_err(|fault| Fault { field, ..fault })
    }
}
