//! Decode steps and fills allocate no memory.
//!
//! Compiled only in optimised builds (`make instructions`): a debug build checks the invariants after every step, and
//! the check allocates.
#![cfg(not(debug_assertions))]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::decide::Kind;
use neuron_sched_core::exclusive::{ExclusiveScheduler, NewRequest, Options, Tokens};
use neuron_sched_core::fill::{Layout as TensorLayout, Shape};
use neuron_sched_core::mixed::{MixedScheduler, NewMixed};
use neuron_sched_core::request::{Prompt, Sampling};

const REQUESTS: u32 = 40;
const STEPS: u32 = 500;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system allocator, with a count of the allocations of each thread.
struct Counting;

// SAFETY: every call is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Return the number of allocations that `work` makes.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

fn config() -> Config {
    let raw = RawConfig {
        max_num_seqs: Some(REQUESTS.into()),
        max_num_batched_tokens: Some(2048),
        max_model_len: Some(4096),
        block_size: Some(16),
        num_blocks: Some(20_000),
        ..RawConfig::default()
    };
    Config::resolve(&raw).unwrap()
}

/// Return a scheduler with `REQUESTS` waiting requests.
fn waiting(prompt: &Prompt) -> ExclusiveScheduler {
    let mut scheduler = ExclusiveScheduler::new(&config());
    for _ in 0..REQUESTS {
        let prompt = prompt.clone();
        let request = NewRequest {
            prompt,
            max_tokens: 2000,
            priority: 0,
            stop_token_ids: [1].into(),
            sampling: Sampling::default(),
        };
        scheduler.add(request).unwrap();
    }
    scheduler
}

/// Plan and complete one step, and return its kind.
fn step(scheduler: &mut ExclusiveScheduler, tokens: &[Option<u32>]) -> Kind {
    let planned = scheduler.schedule(Options::default()).unwrap();
    let (id, kind, rows) = (planned.id(), planned.kind(), planned.rows().len());
    let tokens = if tokens.is_empty() { Tokens::LeftOut } else { Tokens::Given(&tokens[..rows]) };
    scheduler.complete(id, tokens).unwrap();
    kind
}

#[test]
fn exclusive_decode_allocates_nothing() {
    for (prompt, tokens) in [(Prompt::Length(50), vec![]), (Prompt::Tokens((0..50).collect()), vec![Some(7); 40])] {
        let mut scheduler = waiting(&prompt);
        while step(&mut scheduler, &tokens) == Kind::Prefill {}
        step(&mut scheduler, &tokens);
        let count = allocations(|| (0..STEPS).for_each(|_| assert_eq!(step(&mut scheduler, &tokens), Kind::Decode)));
        assert_eq!(count, 0, "{prompt:?}");
    }
}

#[test]
fn filling_allocates_nothing() {
    let layout = TensorLayout::new(&config(), None).unwrap();
    let mut memory = support::Memory::new(&layout, Shape::Prefill { tokens: 128 });
    let mut scheduler = waiting(&Prompt::Tokens((0..50).collect()));
    let planned = scheduler.schedule(Options::default()).unwrap().clone();
    let row = |at| scheduler.prefill_row(&planned, at).unwrap();
    assert_eq!(allocations(|| memory.prefill().write(&layout, (0..planned.rows().len()).map(row))), 0);
    assert_eq!((memory.ids[0][49], memory.int64[1][50]), (49, -1));

    while step(&mut scheduler, &[Some(7)]) == Kind::Prefill && scheduler.num_waiting() > 0 {}
    let planned = scheduler.schedule(Options::default()).unwrap().clone();
    let rows = planned.rows().len();
    let mut memory = support::Memory::new(&layout, Shape::Decode { rows: 40, context: 4096 });
    let fill = || {
        scheduler.check_decodes(&planned, None).unwrap();
        memory.decode().write(&layout, scheduler.decode_rows(&planned, None));
    };
    assert_eq!(allocations(fill), 0);
    assert_eq!((rows, &memory.ids[0][..], memory.int64[0][39]), (40, &[7; 40][..], 50));
}

#[test]
fn mixed_decode_allocates_nothing() {
    let mut scheduler = MixedScheduler::new(2048, REQUESTS.into(), 1 << 30).unwrap();
    for _ in 0..REQUESTS {
        scheduler.add(NewMixed { prompt_len: 50, max_new: 2000, prefilled: 0, generated: 0 }).unwrap();
    }
    let mut step = || {
        scheduler.schedule();
        scheduler.complete().unwrap().len()
    };
    (0..3).for_each(|_| assert!(step() > 0));
    assert_eq!(allocations(|| (0..STEPS).for_each(|_| assert_eq!(step(), REQUESTS as usize))), 0);
}
