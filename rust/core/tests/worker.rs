//! The requests of a worker, and the rows of the steps that it plans, commits and accepts.

use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::error::Error;
use neuron_sched_core::fill::{Layout, Shape};
use neuron_sched_core::request::{Row, Sampling};
use neuron_sched_core::worker::{Plan, RequestUpdate, ScheduledRow, ScheduledStep, Worker};

const NAMES: [&str; 3] = ["a", "b", "c"];

fn worker() -> Worker {
    let raw = RawConfig {
        max_num_seqs: Some(4),
        max_num_batched_tokens: Some(128),
        max_model_len: Some(256),
        block_size: Some(16),
        num_blocks: Some(32),
        num_batched_tokens_buckets: Some(vec![64, 128]),
        max_prefills_per_batch: Some(2),
        decode_context_length_buckets: Some(vec![64, 256]),
        ..RawConfig::default()
    };
    Worker::new(Layout::new(&Config::resolve(&raw).unwrap(), Some(1000)).unwrap())
}

fn new(tokens: &[u32], blocks: &[u32], count: i64, padded: i64) -> ScheduledRow {
    let sampling = Sampling::default();
    let update = RequestUpdate::New { tokens: tokens.to_vec(), prompt: tokens.len(), sampling, replaces: None };
    ScheduledRow { update, blocks: blocks.to_vec(), computed: 0, count, padded }
}

fn known(row: Row, outputs: i64, blocks: &[u32], computed: i64) -> ScheduledRow {
    let update = RequestUpdate::Known { row, outputs };
    ScheduledRow { update, blocks: blocks.to_vec(), computed, count: 1, padded: 1 }
}

fn prefill(rows: Vec<ScheduledRow>) -> ScheduledStep {
    ScheduledStep { finished: Vec::new(), rows, num_seqs_padded: 0 }
}

fn decode(rows: Vec<ScheduledRow>) -> ScheduledStep {
    let num_seqs_padded = [1, 1, 2, 4, 4][rows.len()];
    ScheduledStep { finished: Vec::new(), rows, num_seqs_padded }
}

fn plan(worker: &mut Worker, step: &ScheduledStep) -> Result<Plan, Error> {
    worker.plan(step, None, |at| NAMES[at])
}

/// Plan and commit a step; `tokens` are those of its rows with unknown tokens.
fn fill(worker: &mut Worker, step: ScheduledStep, tokens: &[Option<u32>]) -> Vec<Row> {
    let mut plan = plan(worker, &step).unwrap();
    worker.supply_tokens(&mut plan, tokens).unwrap();
    worker.commit(step, plan).collect()
}

/// Return a worker with two requests with computed prompts: `a` has 16 prompt tokens, `b` has 10.
fn two_decodes() -> (Worker, [Row; 2]) {
    let mut worker = worker();
    let step = prefill(vec![new(&[5; 16], &[1], 16, 16), new(&[6; 10], &[2], 10, 48)]);
    let rows = fill(&mut worker, step, &[]);
    worker.accept(&[Some(70), Some(80)]).unwrap();
    (worker, [rows[0], rows[1]])
}

/// Check that `plan` refuses the step with this message and changes nothing.
fn refused(worker: &mut Worker, step: &ScheduledStep, text: &str) {
    let known = (worker.len(), worker.in_flight());
    assert_eq!(plan(worker, step).unwrap_err().to_string(), text);
    assert_eq!((worker.len(), worker.in_flight()), known);
}

#[test]
fn a_prompt_in_chunks_and_then_a_decode() {
    let mut worker = worker();
    let ids: Vec<u32> = (100..180).collect();
    let step = prefill(vec![new(&ids, &[3, 4, 5, 6], 64, 64)]);
    let first = plan(&mut worker, &step).unwrap();
    assert_eq!((first.shape(), first.total()), (Shape::Prefill { tokens: 64 }, 64));
    assert!(first.emits().eq([false]) && first.unknown().next().is_none());
    let row = worker.commit(step, first).next().unwrap();
    let rows: Vec<_> = worker.prefill_rows().collect();
    assert_eq!((rows[0].tokens, rows[0].start, rows[0].blocks), (&ids[..64], 0, &[3, 4, 5, 6][..]));
    worker.accept(&[None]).unwrap();

    let step = prefill(vec![ScheduledRow { count: 16, padded: 64, ..known(row, 0, &[7], 64) }]);
    let last = plan(&mut worker, &step).unwrap();
    assert!(last.emits().eq([true]));
    assert!(worker.commit(step, last).eq([row]));
    let rows: Vec<_> = worker.prefill_rows().collect();
    assert_eq!((rows[0].tokens, rows[0].start, rows[0].blocks), (&ids[64..], 64, &[3, 4, 5, 6, 7][..]));
    worker.accept(&[Some(42)]).unwrap();

    let step = decode(vec![known(row, 1, &[8], 80)]);
    let next = plan(&mut worker, &step).unwrap();
    assert_eq!((next.shape(), next.total()), (Shape::Decode { rows: 1, context: 256 }, 1));
    worker.commit(step, next).for_each(drop);
    let rows: Vec<_> = worker.decode_rows().collect();
    assert_eq!((rows[0].token, rows[0].position, rows[0].blocks), (42, 80, &[3, 4, 5, 6, 7, 8][..]));
}

#[test]
fn the_caller_supplies_tokens_of_steps_in_flight() {
    let (mut worker, [a, b]) = two_decodes();
    fill(&mut worker, decode(vec![known(a, 1, &[9], 16), known(b, 1, &[], 10)]), &[]);
    let step = decode(vec![known(a, 2, &[], 17), known(b, 2, &[], 11)]);
    let mut ahead = plan(&mut worker, &step).unwrap();
    assert!(ahead.unknown().eq([0, 1]));
    assert_eq!(
        worker.supply_tokens(&mut ahead, &[Some(71)]).unwrap_err().to_string(),
        "rows[1].tokens: none at position 11: expected a token passed to fill(), or accept() called for the step that \
         samples it"
    );
    worker.supply_tokens(&mut ahead, &[Some(71), Some(81)]).unwrap();
    worker.commit(step, ahead).for_each(drop);
    assert!(worker.decode_rows().map(|row| row.token).eq([71, 81]));
    assert_eq!(worker.in_flight(), 2);

    // Once both steps are accepted, the tokens of the next step are known.
    worker.accept(&[Some(71), Some(81)]).unwrap();
    worker.accept(&[Some(72), Some(82)]).unwrap();
    fill(&mut worker, decode(vec![known(a, 3, &[], 18), known(b, 3, &[], 12)]), &[]);
    assert!(worker.decode_rows().map(|row| (row.token, row.position)).eq([(72, 18), (82, 12)]));
}

#[test]
fn outputs_that_the_scheduler_discards_are_dropped() {
    let (mut worker, [a, b]) = two_decodes();
    fill(&mut worker, decode(vec![known(a, 1, &[9], 16), known(b, 1, &[], 10)]), &[]);
    worker.accept(&[Some(71), Some(81)]).unwrap();
    // The same position is computed again, so its first output token is dropped.
    fill(&mut worker, decode(vec![known(a, 1, &[], 16)]), &[]);
    assert!(worker.decode_rows().map(|row| (row.token, row.position)).eq([(70, 16)]));
    worker.accept(&[Some(77)]).unwrap();
    fill(&mut worker, decode(vec![known(a, 2, &[], 17)]), &[]);
    assert!(worker.decode_rows().map(|row| row.token).eq([77]));
}

#[test]
fn the_output_of_a_step_filled_before_a_reset_is_ignored() {
    let (mut worker, [a, _]) = two_decodes();
    fill(&mut worker, decode(vec![known(a, 1, &[9], 16)]), &[]);
    fill(&mut worker, decode(vec![known(a, 2, &[], 17)]), &[Some(71)]);
    fill(&mut worker, decode(vec![known(a, 1, &[], 16)]), &[]);
    for token in [71, 72, 75] {
        worker.accept(&[Some(token)]).unwrap();
    }
    fill(&mut worker, decode(vec![known(a, 2, &[], 17)]), &[]);
    let token = worker.decode_rows().next().unwrap().token;
    assert_eq!(token, 75);
}

#[test]
fn in_flight_rows_of_finished_and_resumed_requests_are_ignored() {
    let (mut worker, [a, b]) = two_decodes();
    fill(&mut worker, decode(vec![known(a, 1, &[9], 16), known(b, 1, &[], 10)]), &[]);
    // `a` finishes and a new request takes its id; `b` resumes with other blocks.
    let replaced = new(&[7; 17], &[11, 12], 17, 17);
    let RequestUpdate::New { tokens, prompt, sampling, .. } = replaced.update else { unreachable!() };
    let update = RequestUpdate::New { tokens, prompt, sampling, replaces: Some(a) };
    let replaced = ScheduledRow { update, ..replaced };
    let tokens = [vec![6; 10], vec![80]].concat();
    let update = RequestUpdate::Resumed { row: b, outputs: 1, tokens };
    let resumed = ScheduledRow { update, blocks: vec![13], computed: 0, count: 11, padded: 47 };
    let step = ScheduledStep { finished: vec![a], ..prefill(vec![replaced, resumed]) };
    let rows = fill(&mut worker, step, &[]);
    assert!(rows[0] != a && rows[1] == b && worker.len() == 2);
    let filled: Vec<_> = worker.prefill_rows().map(|row| (row.tokens.to_vec(), row.blocks.to_vec())).collect();
    assert_eq!(filled[0], (vec![7; 17], vec![11, 12]));
    assert_eq!(filled[1], ([vec![6; 10], vec![80]].concat(), vec![13]));

    // Any entry is accepted for the rows of the old requests, and ignored.
    worker.accept(&[Some(17), None]).unwrap();
    worker.accept(&[Some(18), Some(19)]).unwrap();
    fill(&mut worker, decode(vec![known(rows[0], 1, &[], 17), known(rows[1], 2, &[], 11)]), &[]);
    assert!(worker.decode_rows().map(|row| row.token).eq([18, 19]));
    worker.finish(&rows);
    assert!(worker.is_empty());
    worker.accept(&[None, None]).unwrap();
}

#[test]
fn the_last_prompt_token_may_be_scheduled_as_a_decode() {
    let (mut worker, [a, _]) = two_decodes();
    let loaded = ScheduledRow { computed: 15, ..new(&[7; 16], &[3], 1, 1) };
    fill(&mut worker, decode(vec![known(a, 1, &[9], 16), loaded]), &[]);
    assert!(worker.decode_rows().map(|row| (row.token, row.position)).eq([(70, 16), (7, 15)]));
}

#[test]
fn a_bad_step_is_refused_with_its_fault() {
    let (mut worker, [a, b]) = two_decodes();
    let two = |first: ScheduledRow, second: ScheduledRow| decode(vec![first, second]);
    let fresh = || known(a, 1, &[9], 16);
    let step = two(fresh(), known(b, 1, &[], 8));
    refused(
        &mut worker,
        &step,
        "decode step: 1 tokens of prefilling request b: expected decoding requests with 1 token each",
    );
    let step =
        ScheduledStep { num_seqs_padded: 0, ..two(fresh(), ScheduledRow { padded: 63, ..known(b, 1, &[], 10) }) };
    refused(
        &mut worker,
        &step,
        "prefill step: 1 tokens of decoding request a: expected prefilling requests with at least 1 token each",
    );
    let step = ScheduledStep { num_seqs_padded: 3, ..two(fresh(), known(b, 1, &[], 10)) };
    refused(&mut worker, &step, "num_seqs_padded: 3: expected one of [1, 2, 4]");
    let step = ScheduledStep { num_seqs_padded: -1, ..two(fresh(), known(b, 1, &[], 10)) };
    refused(&mut worker, &step, "num_seqs_padded: -1: expected one of [1, 2, 4]");
    let step = prefill(vec![new(&[5; 10], &[3], 10, 10)]);
    refused(&mut worker, &step, "num_scheduled_tokens_padded: 10 in total: expected a sum that is one of [64, 128]");
    refused(&mut worker, &ScheduledStep::default(), "num_scheduled_tokens: none: expected at least one request");
    let step = prefill(vec![new(&[1000; 10], &[3], 10, 64)]);
    refused(&mut worker, &step, "rows[0].prompt_token_ids: 1000: expected an id below vocab_size = 1000");
    let step = prefill(vec![new(&[u32::MAX; 10], &[3], 10, 64)]);
    refused(&mut worker, &step, "rows[0].prompt_token_ids: 4294967295: expected token ids from 0 to 2147483647");
    let step = two(fresh(), known(b, 1, &[2], 10));
    refused(&mut worker, &step, "rows[1].block_ids: 2 twice: expected each block once");
    let step = ScheduledStep { finished: vec![b, a], ..two(fresh(), known(b, 1, &[], 10)) };
    let text = "rows[0].request: unknown: expected a request of an earlier step that has not finished";
    refused(&mut worker, &step, text);
    let step = prefill(vec![new(&[5; 10], &[3], 10, 10), new(&[5; 9], &[4], 9, 9), new(&[5; 9], &[5], 9, 45)]);
    refused(&mut worker, &step, "rows: 3 prompts: expected at most max_prefills_per_batch = 2");

    // The refused steps have changed nothing.
    fill(&mut worker, two(fresh(), known(b, 1, &[], 10)), &[]);
    let rows: Vec<_> = worker.decode_rows().map(|row| (row.token, row.blocks.to_vec())).collect();
    assert_eq!(rows, [(70, vec![1, 9]), (80, vec![2])]);
}

#[test]
fn the_caller_may_choose_a_larger_context_bucket() {
    let (mut worker, [a, _]) = two_decodes();
    let step = decode(vec![known(a, 1, &[9], 16)]);
    let mut context = |bucket| worker.plan(&step, bucket, |at| NAMES[at]).map(|plan| plan.shape());
    assert_eq!(context(None), Ok(Shape::Decode { rows: 1, context: 64 }));
    assert_eq!(context(Some(256)), Ok(Shape::Decode { rows: 1, context: 256 }));
    assert!(context(Some(128)).is_err());
}

#[test]
fn bad_sampled_tokens_are_refused_and_the_step_stays_in_flight() {
    let (mut worker, [a, b]) = two_decodes();
    assert!(matches!(worker.accept(&[]), Err(Error::NotDue(_))));
    fill(&mut worker, decode(vec![known(a, 1, &[9], 16), known(b, 1, &[], 10)]), &[]);
    for (sampled, text) in [
        (&[Some(1)][..], "sampled: 1 entries: expected one for each of 2 rows"),
        (&[Some(1), None], "rows[1].sampled: []: expected one token"),
        (&[Some(1), Some(1000)], "rows[1].sampled: 1000: expected an id below vocab_size = 1000"),
    ] {
        assert_eq!(worker.accept(sampled).unwrap_err().to_string(), text);
    }
    worker.accept(&[Some(71), Some(81)]).unwrap();
    fill(&mut worker, prefill(vec![new(&[5; 100], &[3, 4, 5, 6], 64, 64)]), &[]);
    let text = "rows[0].sampled: 7: expected [] for a chunk in the middle of a prompt";
    assert_eq!(worker.accept(&[Some(7)]).unwrap_err().to_string(), text);
    worker.accept(&[None]).unwrap();
}
