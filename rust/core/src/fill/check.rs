//! Checks of a caller's rows: everything that the tensors rely on, before any element is written.

use super::layout::{Layout, Shape};
use super::row::{DecodeRow, PrefillRow};
use crate::error::{Error, Fault};

/// The block ids found so far in one row, to detect duplicates. The memory is reused from row to row.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Number of the last row that contains a block, by block id up to the largest id found.
    last_row: Vec<u32>,
    row: u32,
}

impl Seen {
    /// Start the next row: forget the block ids of the row before.
    fn next_row(&mut self) {
        self.row = self.row.checked_add(1).unwrap_or_else(|| {
            self.last_row.fill(0);
            1
        });
    }

    /// Add a block id. Return whether the row contains it already, or `None` if memory is exhausted.
    fn insert(&mut self, block: u32) -> Option<bool> {
        let at = block as usize;
        if at >= self.last_row.len() {
            self.last_row.try_reserve(at + 1 - self.last_row.len()).ok()?;
            self.last_row.resize(at + 1, 0);
        }
        Some(std::mem::replace(&mut self.last_row[at], self.row) == self.row)
    }
}

impl Layout {
    /// Check the rows of a prefill and return the smallest shape that holds them.
    pub fn check_prefill(&self, rows: &[PrefillRow<'_>], seen: &mut Seen) -> Result<Shape, Error> {
        let shape = self.prefill(rows.len(), rows.iter().map(|row| row.tokens.len() as u64).sum())?;
        for (at, row) in rows.iter().enumerate() {
            self.check_tokens(row.tokens)
                .and_then(|()| self.check_positions(row.end(), row.blocks.len()))
                .and_then(|()| self.check_blocks(row.blocks, seen))
                .map_err(|fault| Error::Row { at, fault })?;
        }
        Ok(shape)
    }

    /// Check the rows of a decode step and return their shape, as [`Layout::decode`] does.
    pub fn check_decode(&self, rows: &[DecodeRow<'_>], bucket: Option<i64>, seen: &mut Seen) -> Result<Shape, Error> {
        for (at, row) in rows.iter().enumerate() {
            self.check_token(row.token, "token_id")
                .and_then(|()| self.check_positions(u64::from(row.position) + 1, row.blocks.len()))
                .and_then(|()| self.check_drafts(row))
                .and_then(|()| self.check_blocks(row.blocks, seen))
                .map_err(|fault| Error::Row { at, fault })?;
        }
        self.decode(rows.len(), rows.iter().map(DecodeRow::context).max().unwrap_or(0), bucket)
    }

    /// Check that there is at least one token id and that every id is in the vocabulary.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), Fault> {
        if tokens.is_empty() {
            return Err(Fault::new("token_ids", "none", "at least one"));
        }
        let Some(vocab_size) = self.vocab_size else { return Ok(()) };
        // The maximum is vectorized, unlike a search for the first id out of range.
        if tokens.iter().copied().max() >= Some(vocab_size) {
            let wrong = tokens.iter().find(|&&token| token >= vocab_size).expect("the maximum is out of range");
            return self.check_token(*wrong, "token_ids");
        }
        Ok(())
    }

    /// Check that a token id is in the vocabulary; `field` is the name in the fault.
    pub fn check_token(&self, token: u32, field: &'static str) -> Result<(), Fault> {
        match self.vocab_size {
            Some(size) if token >= size => Err(Fault::new(field, token, format!("an id below vocab_size = {size}"))),
            _ => Ok(()),
        }
    }

    /// Check that the positions below `end` are below `max_model_len`, and that `blocks` KV blocks hold them and are
    /// no more than the longest sequence takes.
    pub fn check_positions(&self, end: u64, blocks: usize) -> Result<(), Fault> {
        if end > self.max_model_len.into() {
            let expected = format!("below max_model_len = {}", self.max_model_len);
            return Err(Fault::new("position", end.saturating_sub(1), expected));
        }
        let (least, most) = (end.div_ceil(self.block_size.into()), self.max_model_len.div_ceil(self.block_size));
        if !(least..=u64::from(most)).contains(&(blocks as u64)) {
            let range = if least == u64::from(most) { least.to_string() } else { format!("{least} to {most}") };
            let expected = format!("{range} for positions up to {}", end.saturating_sub(1));
            return Err(Fault::new("block_ids", format!("{blocks} blocks"), expected));
        }
        Ok(())
    }

    /// Check that every block id is from 1 to `num_blocks` and occurs once in the row.
    pub fn check_blocks<'a>(&self, blocks: impl IntoIterator<Item = &'a u32>, seen: &mut Seen) -> Result<(), Fault> {
        seen.next_row();
        for &block in blocks {
            if !(1..=self.num_blocks).contains(&block) {
                let expected = format!("ids from 1 to num_blocks = {}", self.num_blocks);
                return Err(Fault::new("block_ids", block, expected));
            }
            match seen.insert(block) {
                Some(false) => {}
                Some(true) => return Err(Fault::new("block_ids", format!("{block} twice"), "each block once")),
                None => {
                    return Err(Fault::new("block_ids", block, "ids small enough to check in the available memory"));
                }
            }
        }
        Ok(())
    }

    fn check_drafts(&self, row: &DecodeRow<'_>) -> Result<(), Fault> {
        if row.context() > self.max_model_len.into() {
            let most = self.max_model_len - row.position - 1;
            let expected = format!("at most {most} after position {}", row.position);
            return Err(Fault::new("draft_tokens", row.drafts, expected));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::layout;
    use super::*;
    use crate::request::Sampling;

    #[test]
    fn the_fault_of_a_bad_prefill_row_names_row_field_and_value() {
        let layout = layout(|_| {});
        let refused = |start, tokens: &[u32], blocks: &[u32]| {
            let row = PrefillRow { tokens, start, blocks, sampling: Sampling::default() };
            layout.check_prefill(&[row], &mut Seen::default()).map_err(|error| error.to_string())
        };
        assert!(refused(0, &[999; 100], &[1, 32]).is_ok());
        let cases: [(u32, &[u32], &[u32], &str); 8] = [
            (0, &[], &[1], "rows[0].token_ids: none: expected at least one"),
            (0, &[5, 1000], &[1], "rows[0].token_ids: 1000: expected an id below vocab_size = 1000"),
            (1000, &[0; 25], &[1], "rows[0].position: 1024: expected below max_model_len = 1024"),
            (0, &[0; 65], &[1], "rows[0].block_ids: 1 blocks: expected 2 to 16 for positions up to 64"),
            (0, &[0; 64], &[1; 17], "rows[0].block_ids: 17 blocks: expected 1 to 16 for positions up to 63"),
            (0, &[0], &[3, 0], "rows[0].block_ids: 0: expected ids from 1 to num_blocks = 32"),
            (0, &[0], &[3, 33], "rows[0].block_ids: 33: expected ids from 1 to num_blocks = 32"),
            (0, &[0], &[3, 4, 3], "rows[0].block_ids: 3 twice: expected each block once"),
        ];
        for (start, tokens, blocks, text) in cases {
            assert_eq!(refused(start, tokens, blocks), Err(text.into()));
        }
    }

    #[test]
    fn rows_may_share_blocks_and_drafts_count_as_context() {
        let layout = layout(|raw| raw.decode_context_length_buckets = Some(vec![128]));
        let mut seen = Seen::default();
        let row = |position, drafts| DecodeRow {
            token: 1,
            position,
            blocks: &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
            sampling: Sampling::default(),
            drafts,
        };
        let shape = |rows: &[DecodeRow<'_>], seen: &mut Seen| layout.check_decode(rows, None, seen);
        assert_eq!(shape(&[row(125, 2), row(0, 0)], &mut seen), Ok(Shape::Decode { rows: 2, context: 128 }));
        assert_eq!(shape(&[row(126, 2)], &mut seen), Ok(Shape::Decode { rows: 1, context: 1024 }));
        let refused = shape(&[row(0, 0), row(1020, 4)], &mut seen).unwrap_err().to_string();
        assert_eq!(refused, "rows[1].draft_tokens: 4: expected at most 3 after position 1020");
    }
}
