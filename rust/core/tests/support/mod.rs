//! The tensors of one shape in test memory, filled with arbitrary values until they are written.

use neuron_sched_core::fill::{DecodeTensors, Layout, PrefillTensors, Shape};

pub(crate) struct Memory {
    /// `input_ids`, `block_table`.
    pub(crate) ids: [Vec<u32>; 2],
    /// `cached_seq_len` or `context_lens`, `cu_seqlens`.
    pub(crate) int32: [Vec<i32>; 2],
    /// `positions`, `slot_mapping`, `logits_index`.
    pub(crate) int64: [Vec<i64>; 3],
    pub(crate) sampling: Vec<f32>,
}

impl Memory {
    pub(crate) fn new(layout: &Layout, shape: Shape) -> Self {
        let (tokens, rows) = match shape {
            Shape::Prefill { tokens } => (tokens, layout.prefills_max()),
            Shape::Decode { rows, .. } => (rows, rows),
        };
        let ids = [tokens, rows * layout.table_width(shape)].map(|len| vec![77; len as usize]);
        let int32 = [rows, rows + 1].map(|len| vec![77; len as usize]);
        let int64 = [tokens, tokens, rows].map(|len| vec![77; len as usize]);
        Self { ids, int32, int64, sampling: vec![7.7; 3 * rows as usize] }
    }

    pub(crate) fn prefill(&mut self) -> PrefillTensors<'_> {
        let [input_ids, block_table] = &mut self.ids;
        let [cached_seq_len, cu_seqlens] = &mut self.int32;
        let [positions, slot_mapping, logits_index] = &mut self.int64;
        PrefillTensors {
            input_ids,
            positions,
            slot_mapping,
            block_table,
            cached_seq_len,
            cu_seqlens,
            logits_index,
            sampling_params: &mut self.sampling,
        }
    }

    pub(crate) fn decode(&mut self) -> DecodeTensors<'_> {
        let [input_ids, block_table] = &mut self.ids;
        let [context_lens, _] = &mut self.int32;
        let [positions, slot_mapping, logits_index] = &mut self.int64;
        DecodeTensors {
            input_ids,
            positions,
            slot_mapping,
            block_table,
            context_lens,
            logits_index,
            sampling_params: &mut self.sampling,
        }
    }
}
