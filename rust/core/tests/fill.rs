//! Every element of every tensor, for small steps.

mod support;

use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::fill::{DecodeRow, Layout, NO_BLOCK, PrefillRow, Seen, Shape};
use neuron_sched_core::request::Sampling;
use support::Memory;

fn layout(prefills: i64) -> Layout {
    let raw = RawConfig {
        max_num_seqs: Some(8),
        max_num_batched_tokens: Some(512),
        max_model_len: Some(1024),
        block_size: Some(64),
        num_blocks: Some(32),
        max_prefills_per_batch: Some(prefills),
        ..RawConfig::default()
    };
    Layout::new(&Config::resolve(&raw).unwrap(), None).unwrap()
}

fn prompt<'a>(tokens: &'a [u32], start: u32, blocks: &'a [u32]) -> PrefillRow<'a> {
    PrefillRow { tokens, start, blocks, sampling: Sampling::default() }
}

#[test]
fn r01_every_element_of_a_padded_prefill() {
    let layout = layout(1);
    let ids: Vec<u32> = (500..600).collect();
    let row = prompt(&ids, 0, &[10, 15]);
    assert_eq!(layout.check_prefill(&[row], &mut Seen::default()), Ok(Shape::Prefill { tokens: 128 }));
    let mut memory = Memory::new(&layout, Shape::Prefill { tokens: 128 });
    memory.prefill().write(&layout, [row]);
    let [input_ids, block_table] = &memory.ids;
    let [cached_seq_len, cu_seqlens] = &memory.int32;
    let [positions, slot_mapping, logits_index] = &memory.int64;
    assert_eq!(input_ids[..], [(500..600).collect(), vec![0; 28]].concat());
    assert_eq!(positions[..], [(0..100).collect(), vec![99; 28]].concat());
    assert_eq!(slot_mapping[..], [(640..704).collect(), (960..996).collect(), vec![-1; 28]].concat());
    assert_eq!(block_table[..], [vec![10, 15], vec![NO_BLOCK; 14]].concat());
    assert_eq!((&cached_seq_len[..], &cu_seqlens[..], &logits_index[..]), (&[0][..], &[0, 100][..], &[99][..]));
    assert_eq!(memory.sampling, [-1.0, 1.0, 0.0]);
}

#[test]
fn the_slots_of_a_chunk_may_start_within_a_block() {
    let layout = layout(1);
    let mut memory = Memory::new(&layout, Shape::Prefill { tokens: 128 });
    memory.prefill().write(&layout, [prompt(&[1, 2, 3, 4], 62, &[10, 15])]);
    assert_eq!(memory.int64[1][..5], [702, 703, 960, 961, -1]);
    assert_eq!((memory.int64[0][3], memory.int64[0][127], memory.int32[0][0]), (65, 65, 62));
}

#[test]
fn packed_prompts_are_concatenated() {
    let layout = layout(3);
    let (first, second) = (prompt(&[5; 70], 0, &[1, 2]), prompt(&[6; 30], 64, &[3, 4]));
    let mut memory = Memory::new(&layout, Shape::Prefill { tokens: 128 });
    memory.prefill().write(&layout, [first, second]);
    let [input_ids, block_table] = &memory.ids;
    let [cached_seq_len, cu_seqlens] = &memory.int32;
    let [positions, slot_mapping, logits_index] = &memory.int64;
    assert_eq!(input_ids[..], [[5; 70].as_slice(), &[6; 30], &[0; 28]].concat());
    assert_eq!(positions[..], [(0..70).collect(), (64..94).collect(), vec![93; 28]].concat());
    assert_eq!(slot_mapping[68..], [vec![132, 133], (256..286).collect(), vec![-1; 28]].concat());
    let tables = [vec![1, 2], vec![NO_BLOCK; 14], vec![3, 4], vec![NO_BLOCK; 30]].concat();
    assert_eq!(block_table[..], tables);
    assert_eq!((&cached_seq_len[..], &cu_seqlens[..]), (&[0, 64, 0][..], &[0, 70, 100, 100][..]));
    assert_eq!(logits_index[..], [69, 99, 99]);
}

#[test]
fn every_element_of_a_padded_decode_step() {
    let layout = layout(1);
    let sampling = Sampling { top_k: 5.0, top_p: 0.5, temperature: 0.7 };
    let row = |token, position, blocks| DecodeRow { token, position, blocks, sampling, drafts: 0 };
    let rows = [row(8, 100, &[10, 15, 22][..]), row(9, 17, &[2])];
    let shape = layout.check_decode(&rows, None, &mut Seen::default());
    assert_eq!(shape, Ok(Shape::Decode { rows: 2, context: 1024 }));
    let mut memory = Memory::new(&layout, Shape::Decode { rows: 8, context: 1024 });
    memory.decode().write(&layout, rows);
    let [input_ids, block_table] = &memory.ids;
    let [context_lens, _] = &memory.int32;
    let [positions, slot_mapping, logits_index] = &memory.int64;
    assert_eq!(input_ids[..], [8, 9, 0, 0, 0, 0, 0, 0]);
    assert_eq!(positions[..], [100, 17, 0, 0, 0, 0, 0, 0]);
    assert_eq!(slot_mapping[..], [996, 145, -1, -1, -1, -1, -1, -1]);
    assert_eq!(context_lens[..], [101, 18, 0, 0, 0, 0, 0, 0]);
    assert_eq!(logits_index[..], [0, 1, 1, 1, 1, 1, 1, 1]);
    assert_eq!(block_table[..18], [vec![10, 15, 22], vec![NO_BLOCK; 13], vec![2, NO_BLOCK]].concat());
    assert!(block_table[18..].iter().all(|&block| block == NO_BLOCK));
    assert_eq!(memory.sampling[3..9], [5.0, 0.5, 0.7, -1.0, 1.0, 0.0]);
}

#[test]
fn a_step_without_rows_is_padding_only() {
    let layout = layout(2);
    let mut memory = Memory::new(&layout, Shape::Prefill { tokens: 128 });
    memory.prefill().write(&layout, []);
    assert!(memory.int64[1].iter().all(|&slot| slot == -1) && memory.ids[1].iter().all(|&block| block == NO_BLOCK));
    assert_eq!((&memory.int64[0], &memory.int64[2], &memory.int32[1]), (&vec![0; 128], &vec![0; 2], &vec![0; 3]));
    let mut memory = Memory::new(&layout, Shape::Decode { rows: 4, context: 1024 });
    memory.decode().write(&layout, []);
    assert_eq!((&memory.int64[1], &memory.int64[2], &memory.int32[0]), (&vec![-1; 4], &vec![0; 4], &vec![0; 4]));
}
