//! The tensors of a shape, and the pass that writes all of them.

use super::{DecodeRow, Layout, NONE, PrefillRow};
use crate::request::Sampling;

/// The tensors of a prefill of `T` tokens, at most `P` prompts, tables of `W` blocks.
#[derive(Debug)]
#[allow(missing_docs, reason = "named as the tensors are")]
pub struct PrefillTensors<'a> {
    /// `[T]`, as the next two.
    pub input_ids: &'a mut [i32],
    pub positions: &'a mut [i64],
    pub slot_mapping: &'a mut [i64],
    /// `[P, W]`
    pub block_table: &'a mut [i32],
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
    pub input_ids: &'a mut [i32],
    pub positions: &'a mut [i64],
    pub slot_mapping: &'a mut [i64],
    /// `[B, W]`
    pub block_table: &'a mut [i32],
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
            write_ids(&mut self.input_ids[tokens.clone()], row.tokens);
            count_from(&mut self.positions[tokens.clone()], row.start.into());
            write_slots(&mut self.slot_mapping[tokens], row.start, row.blocks, layout.block_size);
            write_table(tables.next().expect("a table for each row"), row.blocks);
            self.cached_seq_len[count] = signed(row.start);
            write_sampling(&mut self.sampling_params[3 * count..][..3], row.sampling);
            position = self.positions[end - 1];
            self.logits_index[count] = index(end) - 1;
            count += 1;
            self.cu_seqlens[count] = i32::try_from(end).expect("at most a bucket");
        }
        self.input_ids[end..].fill(0);
        self.positions[end..].fill(position);
        self.slot_mapping[end..].fill(NONE.into());
        tables.for_each(|table| table.fill(NONE));
        self.cached_seq_len[count..].fill(0);
        self.cu_seqlens[count + 1..].fill(i32::try_from(end).expect("at most a bucket"));
        self.logits_index[count..].fill((index(end) - 1).max(0));
        pad_sampling(&mut self.sampling_params[3 * count..]);
    }
}

impl DecodeTensors<'_> {
    /// Writes every element. More rows than there is room for are a panic.
    pub fn write<'r>(&mut self, layout: &Layout, rows: impl IntoIterator<Item = DecodeRow<'r>>) {
        let mut tables = self.block_table.chunks_exact_mut(self.block_table.len() / self.input_ids.len());
        let mut count = 0;
        for row in rows {
            let (block, offset) = (row.position / layout.block_size, row.position % layout.block_size);
            self.input_ids[count] = signed(row.token);
            self.positions[count] = row.position.into();
            self.slot_mapping[count] = slot(row.blocks[block as usize], layout.block_size) + i64::from(offset);
            write_table(tables.next().expect("a table for each row"), row.blocks);
            self.context_lens[count] = signed(row.position) + 1;
            write_sampling(&mut self.sampling_params[3 * count..][..3], row.sampling);
            count += 1;
        }
        self.input_ids[count..].fill(0);
        self.positions[count..].fill(0);
        self.slot_mapping[count..].fill(NONE.into());
        tables.for_each(|table| table.fill(NONE));
        self.context_lens[count..].fill(0);
        count_from(&mut self.logits_index[..count], 0);
        self.logits_index[count..].fill((index(count) - 1).max(0));
        pad_sampling(&mut self.sampling_params[3 * count..]);
    }
}

/// Token ids, positions and block ids are below 2^31.
fn signed(number: u32) -> i32 {
    number.cast_signed()
}

fn index(at: usize) -> i64 {
    i64::try_from(at).expect("an index of a tensor")
}

/// The first slot of a block.
fn slot(block: u32, block_size: u32) -> i64 {
    i64::from(block) * i64::from(block_size)
}

fn write_ids(to: &mut [i32], ids: &[u32]) {
    for (to, &id) in to.iter_mut().zip(ids) {
        *to = signed(id);
    }
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
        count_from(here, slot(block, block_size) + i64::from(offset));
        to = rest;
        offset = 0;
        if to.is_empty() {
            return;
        }
    }
    assert!(to.is_empty(), "the blocks of a row hold its positions");
}

/// As many blocks as the table has columns: what lies behind is beyond the context.
fn write_table(table: &mut [i32], blocks: &[u32]) {
    let held = blocks.len().min(table.len());
    write_ids(&mut table[..held], &blocks[..held]);
    table[held..].fill(NONE);
}

fn write_sampling(to: &mut [f32], sampling: Sampling) {
    let Sampling { top_k, top_p, temperature } = sampling;
    to.copy_from_slice(&[top_k, top_p, temperature]);
}

fn pad_sampling(to: &mut [f32]) {
    to.chunks_exact_mut(3).for_each(|row| write_sampling(row, Sampling::default()));
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::layout;
    use super::super::{Seen, Shape};
    use super::*;

    /// Tensors of a shape, full of garbage.
    struct Memory {
        small: [Vec<i32>; 4],
        wide: [Vec<i64>; 3],
        sampling: Vec<f32>,
    }

    impl Memory {
        fn new(tokens: usize, rows: usize, width: usize) -> Self {
            let small = [tokens, rows * width, rows, rows + 1].map(|len| vec![77; len]);
            let wide = [tokens, tokens, rows].map(|len| vec![77; len]);
            Self { small, wide, sampling: vec![7.7; 3 * rows] }
        }

        fn prefill(&mut self) -> PrefillTensors<'_> {
            let [input_ids, block_table, cached_seq_len, cu_seqlens] = &mut self.small;
            let [positions, slot_mapping, logits_index] = &mut self.wide;
            let sampling_params = &mut self.sampling;
            PrefillTensors {
                input_ids,
                positions,
                slot_mapping,
                block_table,
                cached_seq_len,
                cu_seqlens,
                logits_index,
                sampling_params,
            }
        }

        fn decode(&mut self) -> DecodeTensors<'_> {
            let [input_ids, block_table, context_lens, _] = &mut self.small;
            let [positions, slot_mapping, logits_index] = &mut self.wide;
            let sampling_params = &mut self.sampling;
            DecodeTensors {
                input_ids,
                positions,
                slot_mapping,
                block_table,
                context_lens,
                logits_index,
                sampling_params,
            }
        }
    }

    fn prompt<'a>(tokens: &'a [u32], start: u32, blocks: &'a [u32]) -> PrefillRow<'a> {
        PrefillRow { tokens, start, blocks, sampling: Sampling::default() }
    }

    #[test]
    fn r01_a_padded_prefill_by_the_book() {
        let layout = layout(|_| {});
        let ids: Vec<u32> = (500..600).collect();
        let row = prompt(&ids, 0, &[10, 15]);
        assert_eq!(layout.check_prefill(&[row], &mut Seen::default()), Ok(Shape::Prefill { tokens: 128 }));
        let mut memory = Memory::new(128, 1, 16);
        memory.prefill().write(&layout, [row]);
        let [input_ids, block_table, cached_seq_len, cu_seqlens] = &memory.small;
        let [positions, slot_mapping, logits_index] = &memory.wide;
        assert_eq!(input_ids[..], [(500..600).collect(), vec![0; 28]].concat());
        assert_eq!(positions[..], [(0..100).collect(), vec![99; 28]].concat());
        assert_eq!(slot_mapping[..], [(640..704).collect(), (960..996).collect(), vec![-1; 28]].concat());
        assert_eq!(block_table[..], [vec![10, 15], vec![-1; 14]].concat());
        assert_eq!((&cached_seq_len[..], &cu_seqlens[..], &logits_index[..]), (&[0][..], &[0, 100][..], &[99][..]));
        assert_eq!(memory.sampling, [-1.0, 1.0, 0.0]);
    }

    #[test]
    fn a_chunk_starts_within_a_block() {
        let layout = layout(|_| {});
        let mut memory = Memory::new(128, 1, 16);
        memory.prefill().write(&layout, [prompt(&[1, 2, 3, 4], 62, &[10, 15])]);
        assert_eq!(memory.wide[1][..5], [702, 703, 960, 961, -1]);
        assert_eq!((memory.wide[0][3], memory.wide[0][127], memory.small[2][0]), (65, 65, 62));
    }

    #[test]
    fn packed_prompts_lie_one_behind_the_other() {
        let layout = layout(|raw| raw.max_prefills_per_batch = Some(3));
        let (first, second) = (prompt(&[5; 70], 0, &[1, 2]), prompt(&[6; 30], 64, &[3, 4]));
        let mut memory = Memory::new(128, 3, 16);
        memory.prefill().write(&layout, [first, second]);
        let [input_ids, block_table, cached_seq_len, cu_seqlens] = &memory.small;
        let [positions, slot_mapping, logits_index] = &memory.wide;
        assert_eq!(input_ids[..], [[5; 70].as_slice(), &[6; 30], &[0; 28]].concat());
        assert_eq!(positions[..], [(0..70).collect(), (64..94).collect(), vec![93; 28]].concat());
        assert_eq!(slot_mapping[68..], [vec![132, 133], (256..286).collect(), vec![-1; 28]].concat());
        let tables = [vec![1, 2], vec![-1; 14], vec![3, 4], vec![-1; 14], vec![-1; 16]].concat();
        assert_eq!(block_table[..], tables);
        assert_eq!((&cached_seq_len[..], &cu_seqlens[..]), (&[0, 64, 0][..], &[0, 70, 100, 100][..]));
        assert_eq!(logits_index[..], [69, 99, 99]);
    }

    #[test]
    fn decodes_and_the_rows_behind_them() {
        let layout = layout(|_| {});
        let sampling = Sampling { top_k: 5.0, top_p: 0.5, temperature: 0.7 };
        let row = |token, position, blocks| DecodeRow { token, position, blocks, sampling, drafts: 0 };
        let rows = [row(8, 100, &[10, 15, 22][..]), row(9, 17, &[2])];
        let shape = layout.check_decode(&rows, None, &mut Seen::default());
        assert_eq!(shape, Ok(Shape::Decode { rows: 2, context: 1024 }));
        let mut memory = Memory::new(8, 8, 16);
        memory.decode().write(&layout, rows);
        let [input_ids, block_table, context_lens, _] = &memory.small;
        let [positions, slot_mapping, logits_index] = &memory.wide;
        assert_eq!(input_ids[..], [8, 9, 0, 0, 0, 0, 0, 0]);
        assert_eq!(positions[..], [100, 17, 0, 0, 0, 0, 0, 0]);
        assert_eq!(slot_mapping[..], [996, 145, -1, -1, -1, -1, -1, -1]);
        assert_eq!(context_lens[..], [101, 18, 0, 0, 0, 0, 0, 0]);
        assert_eq!(logits_index[..], [0, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(block_table[..18], [vec![10, 15, 22], vec![-1; 13], vec![2, -1]].concat());
        assert!(block_table[18..].iter().all(|&block| block == -1));
        assert_eq!(memory.sampling[3..9], [5.0, 0.5, 0.7, -1.0, 1.0, 0.0]);
    }

    #[test]
    fn nothing_but_padding() {
        let layout = layout(|raw| raw.max_prefills_per_batch = Some(2));
        let mut memory = Memory::new(128, 2, 16);
        memory.prefill().write(&layout, []);
        assert!(memory.wide[1].iter().all(|&slot| slot == -1) && memory.small[1].iter().all(|&block| block == -1));
        assert_eq!((&memory.wide[0], &memory.wide[2], &memory.small[3]), (&vec![0; 128], &vec![0; 2], &vec![0; 3]));
        let mut memory = Memory::new(4, 4, 16);
        memory.decode().write(&layout, []);
        assert_eq!((&memory.wide[1], &memory.wide[2], &memory.small[2]), (&vec![-1; 4], &vec![0; 4], &vec![0; 4]));
    }
}
