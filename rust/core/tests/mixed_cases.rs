//! Worked examples of the token-budget scheduler, step by step.

use neuron_sched_core::error::Error;
use neuron_sched_core::mixed::{MixedScheduler, NewMixed};
use neuron_sched_core::request::Row;

struct Case {
    scheduler: MixedScheduler,
    names: Vec<(char, Row)>,
}

impl Case {
    fn new(token_budget: u64, max_seqs: u64, kv_tokens: u64) -> Self {
        Self { scheduler: MixedScheduler::new(token_budget, max_seqs, kv_tokens).unwrap(), names: Vec::new() }
    }

    fn add(&mut self, name: char, prompt_len: u64, max_new: u64) -> Result<(), Error> {
        let row = self.scheduler.add(NewMixed { prompt_len, max_new, prefilled: 0, generated: 0 })?;
        self.names.push((name, row));
        Ok(())
    }

    fn name(&self, row: Row) -> char {
        self.names.iter().find(|entry| entry.1 == row).unwrap().0
    }

    fn row(&self, name: char) -> Row {
        self.names.iter().find(|entry| entry.0 == name).unwrap().1
    }

    /// Run one step and return it as text: the planned tokens, the requests that emit, and the reserved KV tokens.
    fn step(&mut self) -> String {
        let plan = self.scheduler.schedule().to_vec();
        let planned: Vec<String> = plan.iter().map(|p| format!("{}{}", self.name(p.row), p.tokens)).collect();
        let emitted = self.scheduler.complete().unwrap().to_vec();
        let emitted: String = emitted.iter().map(|e| self.name(e.row)).collect();
        format!("{} -> {} ({})", planned.join(" "), emitted, self.scheduler.reserved())
    }
}

#[test]
fn s01_reservations_can_fill_the_kv_cache_exactly() {
    let mut case = Case::new(8, 4, 20);
    for (name, prompt, outputs) in [('a', 6, 4), ('b', 6, 4), ('c', 2, 1)] {
        case.add(name, prompt, outputs).unwrap();
    }
    let steps: Vec<String> = (0..5).map(|_| case.step()).collect();
    assert_eq!(
        steps,
        ["a6 b2 -> a (20)", "a1 b4 -> ab (20)", "a1 b1 -> ab (20)", "a1 b1 -> ab (10)", "b1 c2 -> bc (0)"]
    );
}

#[test]
fn s03_s09_no_request_is_admitted_before_the_head_unless_the_head_is_cancelled() {
    let mut case = Case::new(16, 4, 30);
    for (name, prompt, outputs) in [('a', 10, 10), ('z', 8, 8), ('s', 2, 2)] {
        case.add(name, prompt, outputs).unwrap();
    }
    let mut cancelled = Case { scheduler: case.scheduler.clone(), names: case.names.clone() };
    assert_eq!(case.step(), "a10 -> a (20)");
    for _ in 1..9 {
        assert_eq!(case.step(), "a1 -> a (20)");
    }
    assert_eq!([case.step(), case.step()], ["a1 -> a (0)", "z8 s2 -> zs (20)"]);

    cancelled.step();
    assert_eq!(cancelled.step(), "a1 -> a (20)");
    assert!(cancelled.scheduler.cancel(cancelled.row('z')).is_some());
    assert!(cancelled.scheduler.cancel(cancelled.row('z')).is_none());
    assert_eq!(cancelled.step(), "a1 s2 -> as (24)");
    assert!(cancelled.scheduler.cancel(cancelled.row('a')).is_some());
    assert_eq!(cancelled.scheduler.reserved(), 4);
}

#[test]
fn s05_a_prompt_in_progress_keeps_the_only_slot() {
    let mut case = Case::new(64, 1, 1000);
    case.add('p', 150, 2).unwrap();
    case.add('q', 10, 1).unwrap();
    let steps: Vec<String> = (0..5).map(|_| case.step()).collect();
    assert_eq!(steps, ["p64 ->  (152)", "p64 ->  (152)", "p22 -> p (152)", "p1 -> p (0)", "q10 -> q (0)"]);
}

#[test]
fn s07_a_prompt_in_progress_comes_before_a_waiting_one() {
    let mut case = Case::new(16, 8, 1000);
    case.add('d', 1, 9).unwrap();
    case.step();
    case.add('p', 20, 2).unwrap();
    case.add('q', 4, 1).unwrap();
    let steps: Vec<String> = (0..3).map(|_| case.step()).collect();
    assert_eq!(steps, ["d1 p15 -> d (32)", "d1 p5 q4 -> dpq (32)", "d1 p1 -> dp (10)"]);
}

#[test]
fn s08_a_request_that_never_fits_is_refused_and_an_exact_fit_is_not() {
    let mut case = Case::new(8, 2, 16);
    assert_eq!(case.add('x', 10, 7), Err(Error::NeverFits { needed: 17, usable: 16, unit: "tokens" }));
    case.add('y', 10, 6).unwrap();
    let steps: Vec<String> = (0..7).map(|_| case.step()).collect();
    assert_eq!(steps[..3], ["y8 ->  (16)", "y2 -> y (16)", "y1 -> y (16)"]);
    assert_eq!(steps[6], "y1 -> y (0)");
    assert!(case.scheduler.schedule().is_empty());
}

#[test]
fn a_request_continues_from_its_counts() {
    let mut scheduler = MixedScheduler::new(8, 2, 100).unwrap();
    scheduler.add(NewMixed { prompt_len: 10, max_new: 5, prefilled: 10, generated: 4 }).unwrap();
    let row = scheduler.add(NewMixed { prompt_len: 10, max_new: 5, prefilled: 7, generated: 0 }).unwrap();
    let tokens: Vec<u64> = scheduler.schedule().iter().map(|planned| planned.tokens).collect();
    assert_eq!(tokens, [1, 3]);
    let finished: Vec<bool> = scheduler.complete().unwrap().iter().map(|emitted| emitted.finished).collect();
    assert_eq!(finished, [true, false]);
    let progress = scheduler.progress(row).unwrap();
    assert_eq!((progress.prefilled, progress.generated), (10, 1));
}
