//! The tensors of a shape, and the pass that writes them. Ids are below 2^31, so `u32` has the bits of `int32`.

use super::layout::Layout;
use super::row::{DecodeRow, NO_BLOCK, NO_SLOT, PrefillRow};
use crate::request::Sampling;

/// The tensors of a prefill step of `T` padded tokens and at most `P` prompts, with block tables of `W` columns.
#[derive(Debug)]
pub struct PrefillTensors<'a> {
    /// Token ids. Shape `[T]`; padding is 0.
    pub input_ids: &'a mut [u32],
    /// Positions in the sequence. Shape `[T]`; padding repeats the last position.
    pub positions: &'a mut [i64],
    /// KV slots to write. Shape `[T]`; padding is [`NO_SLOT`].
    pub slot_mapping: &'a mut [i64],
    /// KV blocks of each prompt in order of position. Shape `[P, W]`; padding is [`NO_BLOCK`].
    pub block_table: &'a mut [u32],
    /// Tokens of each prompt computed before the step. Shape `[P, 1]`; padding rows are 0.
    pub cached_seq_len: &'a mut [i32],
    /// Start of each prompt in `input_ids`, then the end. Shape `[P + 1]`; padding repeats the end.
    pub cu_seqlens: &'a mut [i32],
    /// Index of the last token of each prompt in `input_ids`. Shape `[P]`; padding repeats the last index.
    pub logits_index: &'a mut [i64],
    /// `top_k`, `top_p` and `temperature` of each prompt. Shape `[P, 3]`; padding rows are -1, 1, 0.
    pub sampling_params: &'a mut [f32],
}

/// The tensors of a decode step of `B` padded rows, with block tables of `W` columns.
#[derive(Debug)]
pub struct DecodeTensors<'a> {
    /// Token ids. Shape `[B]`; padding is 0.
    pub input_ids: &'a mut [u32],
    /// Positions in the sequence. Shape `[B]`; padding is 0.
    pub positions: &'a mut [i64],
    /// KV slots to write. Shape `[B]`; padding is [`NO_SLOT`].
    pub slot_mapping: &'a mut [i64],
    /// KV blocks of each row in order of position. Shape `[B, W]`; padding is [`NO_BLOCK`].
    pub block_table: &'a mut [u32],
    /// Context length of each row, including the token being computed. Shape `[B]`; padding rows are 0.
    pub context_lens: &'a mut [i32],
    /// Index of each row in `input_ids`. Shape `[B]`; padding repeats the last index.
    pub logits_index: &'a mut [i64],
    /// `top_k`, `top_p` and `temperature` of each row. Shape `[B, 3]`; padding rows are -1, 1, 0.
    pub sampling_params: &'a mut [f32],
}

impl PrefillTensors<'_> {
    /// Write every element. Panics if the rows exceed the token or row capacity of the tensors.
    pub fn write<'r>(&mut self, layout: &Layout, rows: impl IntoIterator<Item = PrefillRow<'r>>) {
        let mut tables = self.block_table.chunks_exact_mut(self.block_table.len() / self.logits_index.len());
        let (mut count, mut end, mut position) = (0, 0, 0);
        self.cu_seqlens[0] = 0;
        for row in rows {
            let tokens = end..end + row.tokens.len();
            end = tokens.end;
            self.input_ids[tokens.clone()].copy_from_slice(row.tokens);
            write_consecutive(&mut self.positions[tokens.clone()], row.start.into());
            write_slots(&mut self.slot_mapping[tokens], row.start, row.blocks, layout.block_size);
            write_table(tables.next().expect("a table for each row"), row.blocks);
            self.cached_seq_len[count] = signed(row.start);
            self.sampling_params.as_chunks_mut().0[count] = sampling_row(row.sampling);
            position = self.positions[end - 1];
            self.logits_index[count] = index(end) - 1;
            count += 1;
            self.cu_seqlens[count] = i32::try_from(end).expect("at most a bucket");
        }
        self.input_ids[end..].fill(0);
        self.positions[end..].fill(position);
        self.slot_mapping[end..].fill(NO_SLOT);
        tables.for_each(|table| table.fill(NO_BLOCK));
        self.cached_seq_len[count..].fill(0);
        self.cu_seqlens[count + 1..].fill(i32::try_from(end).expect("at most a bucket"));
        self.logits_index[count..].fill((index(end) - 1).max(0));
        self.sampling_params.as_chunks_mut().0[count..].fill(sampling_row(Sampling::default()));
    }
}

impl DecodeTensors<'_> {
    /// Write every element. Panics if there are more rows than the tensors hold.
    pub fn write<'r>(&mut self, layout: &Layout, rows: impl IntoIterator<Item = DecodeRow<'r>>) {
        let width = self.block_table.len() / self.input_ids.len();
        // Zipped iterators: one bounds check per row instead of one per tensor.
        let ids = self.input_ids.iter_mut().zip(self.positions.iter_mut());
        let slots = self.slot_mapping.iter_mut().zip(self.context_lens.iter_mut());
        let wide = self.block_table.chunks_exact_mut(width).zip(self.sampling_params.as_chunks_mut().0);
        let mut elements = ids.zip(slots).zip(wide);
        let mut count = 0;
        for row in rows {
            let (((id, position), (slot, context)), (table, sampling)) =
                elements.next().expect("capacity for each row");
            let (block, offset) = (row.position / layout.block_size, row.position % layout.block_size);
            *id = row.token;
            *position = row.position.into();
            *slot = first_slot(row.blocks[block as usize], layout.block_size) + i64::from(offset);
            *context = signed(row.position) + 1;
            *sampling = sampling_row(row.sampling);
            write_table(table, row.blocks);
            count += 1;
        }
        self.input_ids[count..].fill(0);
        self.positions[count..].fill(0);
        self.slot_mapping[count..].fill(NO_SLOT);
        self.block_table[count * width..].fill(NO_BLOCK);
        self.context_lens[count..].fill(0);
        write_consecutive(&mut self.logits_index[..count], 0);
        self.logits_index[count..].fill((index(count) - 1).max(0));
        self.sampling_params.as_chunks_mut().0[count..].fill(sampling_row(Sampling::default()));
    }
}

/// Return a position or count, which is below 2^31, as `i32`.
fn signed(number: u32) -> i32 {
    number.cast_signed()
}

fn index(at: usize) -> i64 {
    i64::try_from(at).expect("an index of a tensor")
}

fn first_slot(block: u32, block_size: u32) -> i64 {
    i64::from(block) * i64::from(block_size)
}

fn write_consecutive(to: &mut [i64], first: i64) {
    let numbers = first..first + index(to.len());
    for (to, number) in to.iter_mut().zip(numbers) {
        *to = number;
    }
}

/// Write the KV slots of the positions from `start` on, block by block.
fn write_slots(mut to: &mut [i64], start: u32, blocks: &[u32], block_size: u32) {
    let mut offset = start % block_size;
    for &block in &blocks[(start / block_size) as usize..] {
        let count = to.len().min((block_size - offset) as usize);
        let (here, rest) = to.split_at_mut(count);
        write_consecutive(here, first_slot(block, block_size) + i64::from(offset));
        to = rest;
        offset = 0;
        if to.is_empty() {
            return;
        }
    }
    assert!(to.is_empty(), "the blocks of a row hold its positions");
}

/// Write the blocks into one row of the block table. Blocks after the last column are outside the context bucket.
///
/// Consecutive decode steps change few blocks, and comparing is cheaper than writing when the tables exceed the CPU
/// cache. A row of a different request mostly differs at its first blocks, where the comparison ends.
fn write_table(table: &mut [u32], blocks: &[u32]) {
    let (here, padding) = table.split_at_mut(blocks.len().min(table.len()));
    let blocks = &blocks[..here.len()];
    if here != blocks {
        here.copy_from_slice(blocks);
    }
    padding.fill(NO_BLOCK);
}

/// Return the parameters in the order of `sampling_params`.
fn sampling_row(sampling: Sampling) -> [f32; 3] {
    let Sampling { top_k, top_p, temperature } = sampling;
    [top_k, top_p, temperature]
}
