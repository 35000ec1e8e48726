//! The tensors of a shape, and the pass that writes all of them. Ids are below 2^31, so `u32` has the bits of `int32`.

use super::layout::Layout;
use super::row::{DecodeRow, NO_BLOCK, NO_SLOT, PrefillRow};
use crate::request::Sampling;

/// The tensors of a prefill of `T` tokens, at most `P` prompts, tables of `W` blocks.
#[derive(Debug)]
#[allow(missing_docs, reason = "named as the tensors are")]
pub struct PrefillTensors<'a> {
    /// `[T]`, as the next two.
    pub input_ids: &'a mut [u32],
    pub positions: &'a mut [i64],
    pub slot_mapping: &'a mut [i64],
    /// `[P, W]`
    pub block_table: &'a mut [u32],
    /// `[P, 1]`
    pub cached_seq_len: &'a mut [i32],
    /// `[P + 1]`
    pub cu_seqlens: &'a mut [i32],
    /// `[P]`
    pub logits_index: &'a mut [i64],
    /// `[P, 3]`
    pub sampling_params: &'a mut [f32],
}

/// The tensors of a decode of `B` rows, tables of `W` blocks.
#[derive(Debug)]
#[allow(missing_docs, reason = "named as the tensors are")]
pub struct DecodeTensors<'a> {
    /// `[B]`, as the next two.
    pub input_ids: &'a mut [u32],
    pub positions: &'a mut [i64],
    pub slot_mapping: &'a mut [i64],
    /// `[B, W]`
    pub block_table: &'a mut [u32],
    /// `[B]`, as the next.
    pub context_lens: &'a mut [i32],
    pub logits_index: &'a mut [i64],
    /// `[B, 3]`
    pub sampling_params: &'a mut [f32],
}

impl PrefillTensors<'_> {
    /// Writes every element. The rows must fit: more tokens or rows than there is room for are a panic.
    pub fn write<'r>(&mut self, layout: &Layout, rows: impl IntoIterator<Item = PrefillRow<'r>>) {
        let mut tables = self.block_table.chunks_exact_mut(self.block_table.len() / self.logits_index.len());
        let (mut count, mut end, mut position) = (0, 0, 0);
        self.cu_seqlens[0] = 0;
        for row in rows {
            let tokens = end..end + row.tokens.len();
            end = tokens.end;
            self.input_ids[tokens.clone()].copy_from_slice(row.tokens);
            count_from(&mut self.positions[tokens.clone()], row.start.into());
            write_slots(&mut self.slot_mapping[tokens], row.start, row.blocks, layout.block_size);
            write_table(tables.next().expect("a table for each row"), row.blocks);
            self.cached_seq_len[count] = signed(row.start);
            self.sampling_params.as_chunks_mut().0[count] = sampled(row.sampling);
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
        self.sampling_params.as_chunks_mut().0[count..].fill(sampled(Sampling::default()));
    }
}

impl DecodeTensors<'_> {
    /// Writes every element. More rows than there is room for are a panic.
    pub fn write<'r>(&mut self, layout: &Layout, rows: impl IntoIterator<Item = DecodeRow<'r>>) {
        let width = self.block_table.len() / self.input_ids.len();
        // Side by side, so that one check a row tells that there is room in all of them.
        let ids = self.input_ids.iter_mut().zip(self.positions.iter_mut());
        let slots = self.slot_mapping.iter_mut().zip(self.context_lens.iter_mut());
        let wide = self.block_table.chunks_exact_mut(width).zip(self.sampling_params.as_chunks_mut().0);
        let mut room = ids.zip(slots).zip(wide);
        let mut count = 0;
        for row in rows {
            let (((id, position), (slot, context)), (table, sampling)) = room.next().expect("room for each row");
            let (block, offset) = (row.position / layout.block_size, row.position % layout.block_size);
            *id = row.token;
            *position = row.position.into();
            *slot = first_slot(row.blocks[block as usize], layout.block_size) + i64::from(offset);
            *context = signed(row.position) + 1;
            *sampling = sampled(row.sampling);
            write_table(table, row.blocks);
            count += 1;
        }
        self.input_ids[count..].fill(0);
        self.positions[count..].fill(0);
        self.slot_mapping[count..].fill(NO_SLOT);
        self.block_table[count * width..].fill(NO_BLOCK);
        self.context_lens[count..].fill(0);
        count_from(&mut self.logits_index[..count], 0);
        self.logits_index[count..].fill((index(count) - 1).max(0));
        self.sampling_params.as_chunks_mut().0[count..].fill(sampled(Sampling::default()));
    }
}

/// Positions are below 2^31.
fn signed(number: u32) -> i32 {
    number.cast_signed()
}

fn index(at: usize) -> i64 {
    i64::try_from(at).expect("an index of a tensor")
}

fn first_slot(block: u32, block_size: u32) -> i64 {
    i64::from(block) * i64::from(block_size)
}

fn count_from(to: &mut [i64], first: i64) {
    let numbers = first..first + index(to.len());
    for (to, number) in to.iter_mut().zip(numbers) {
        *to = number;
    }
}

/// The slots of the positions from `start` on, block by block.
fn write_slots(mut to: &mut [i64], start: u32, blocks: &[u32], block_size: u32) {
    let mut offset = start % block_size;
    for &block in &blocks[(start / block_size) as usize..] {
        let held = to.len().min((block_size - offset) as usize);
        let (here, rest) = to.split_at_mut(held);
        count_from(here, first_slot(block, block_size) + i64::from(offset));
        to = rest;
        offset = 0;
        if to.is_empty() {
            return;
        }
    }
    assert!(to.is_empty(), "the blocks of a row hold its positions");
}

/// As many blocks as the table has columns: what lies behind is beyond the context.
///
/// From one decode step to the next few blocks are new, and to look is cheaper than to write where the tables are more
/// than a cache holds; a row that was another's mostly differs at its first blocks.
fn write_table(table: &mut [u32], blocks: &[u32]) {
    let (here, behind) = table.split_at_mut(blocks.len().min(table.len()));
    let blocks = &blocks[..here.len()];
    if here != blocks {
        here.copy_from_slice(blocks);
    }
    behind.fill(NO_BLOCK);
}

/// As the tensor has it.
fn sampled(sampling: Sampling) -> [f32; 3] {
    let Sampling { top_k, top_p, temperature } = sampling;
    [top_k, top_p, temperature]
}
