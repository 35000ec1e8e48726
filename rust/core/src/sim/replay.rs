//! The entry point: replay one workload through one scheduler.

use std::ops::ControlFlow;

use super::cost::Cost;
use super::drive::Drive;
use super::exclusive::Exclusive;
use super::mixed::Mixed;
use super::options::{Options, Progress, Scheduler};
use super::report::Report;
use super::workload::Arrival;
use crate::config::Config;
use crate::error::Error;

/// Run `workload` until every request has finished or was refused; `None` if `observer` has stopped the replay.
///
/// `observer` is called every 1024 decisions and at the end. Refused requests are part of the report. An error is a
/// cost that takes the clock beyond 2^63 nanoseconds, or a violated invariant of the scheduler.
pub fn replay(
    workload: &[Arrival],
    scheduler: Scheduler,
    config: &Config,
    cost: &Cost,
    options: Options,
    observer: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Option<Report>, Error> {
    match scheduler {
        Scheduler::Bucket => Drive::new(Exclusive::new(config), workload, cost, options).run(observer),
        Scheduler::Mixed => Drive::new(Mixed::new(config)?, workload, cost, options).run(observer),
    }
}

#[cfg(test)]
mod tests {
    use super::super::counters::Bucket;
    use super::super::distribution::Distribution;
    use super::super::refusal::Refusal;
    use super::super::report::{Record, StepCounts, TokenCounts};
    use super::*;
    use crate::config::RawConfig;
    use crate::request::Prompt;

    const MS: u64 = 1_000_000;

    fn config(max_num_seqs: i64, max_model_len: i64, num_blocks: i64) -> Config {
        let raw = RawConfig {
            max_num_seqs: Some(max_num_seqs),
            max_num_batched_tokens: Some(max_model_len),
            max_model_len: Some(max_model_len),
            block_size: Some(16),
            num_blocks: Some(num_blocks),
            ..RawConfig::default()
        };
        Config::resolve(&raw).unwrap()
    }

    fn arrivals(requests: &[(u64, u32, u32)]) -> Vec<Arrival> {
        let arrival = |&(at, prompt, outputs)| Arrival { at, prompt: Prompt::Length(prompt), outputs, priority: 0 };
        requests.iter().map(arrival).collect()
    }

    fn run(scheduler: Scheduler, config: &Config, requests: &[(u64, u32, u32)]) -> Report {
        let cost = Cost::constant(100 * MS, 10 * MS);
        let options = Options { record_steps: true, one_by_one: false };
        replay(&arrivals(requests), scheduler, config, &cost, options, &mut |_| ControlFlow::Continue(()))
            .unwrap()
            .unwrap()
    }

    /// Time to first token and end-to-end time of each request, in milliseconds.
    fn times(report: &Report) -> Vec<(u64, u64)> {
        let since = |record: &Record, at: Option<u64>| (at.unwrap() - record.arrival) / MS;
        report.records.iter().map(|r| (since(r, r.first_token), since(r, r.end))).collect()
    }

    #[test]
    fn m02_the_time_to_first_token_includes_the_queue_time() {
        let config = config(2, 1024, 1024);
        let together = run(Scheduler::Bucket, &config, &[(0, 128, 3), (0, 128, 3)]);
        assert_eq!(times(&together), [(100, 220), (200, 220)]);
        let gaps: Vec<_> = together.records.iter().map(Record::mean_itl_s).collect();
        assert_eq!(gaps, [Some(0.06), Some(0.01)]);
        let later = run(Scheduler::Bucket, &config, &[(0, 128, 3), (50 * MS, 128, 3)]);
        assert_eq!(times(&later)[1], (150, 170));
        let apart = run(Scheduler::Bucket, &config, &[(0, 128, 3), (1000 * MS, 128, 3)]);
        assert_eq!(times(&apart), [(100, 120), (100, 120)]);
        assert_eq!(apart.summary.makespan_s.to_string(), "1.12");
    }

    #[test]
    fn m04_a_single_output_has_no_inter_token_latency() {
        let report = run(Scheduler::Bucket, &config(2, 1024, 1024), &[(0, 128, 1), (0, 128, 3)]);
        assert_eq!(times(&report), [(100, 100), (200, 220)]);
        assert_eq!((report.records[0].mean_itl_s(), report.records[1].mean_itl_s()), (None, Some(0.01)));
        let ten = Distribution { mean: 10.0, p50: 10.0, p90: 10.0, p99: 10.0, max: 10.0 };
        assert_eq!(report.summary.itl_ms, Some(ten));
        let alone = run(Scheduler::Bucket, &config(2, 1024, 1024), &[(0, 128, 1)]);
        assert_eq!(alone.summary.itl_ms, None);
    }

    #[test]
    fn m07_outputs_are_capped_by_the_model_length() {
        for scheduler in [Scheduler::Bucket, Scheduler::Mixed] {
            let requests = [(0, 51, 100), (0, 99, 5), (0, 100, 5), (0, 101, 5)];
            let report = run(scheduler, &config(4, 100, 100), &requests);
            let outputs: Vec<u32> = report.records.iter().map(|record| record.outputs).collect();
            assert_eq!(outputs, [49, 1, 1, 0]);
            assert_eq!((report.refused, report.records[3].refusal), (vec![3], Some(Refusal::PromptTooLong)));
            assert_eq!((report.summary.completed, report.summary.rejected), (3, 1));
        }
    }

    #[test]
    fn a_request_that_never_fits_is_refused_and_the_replay_continues() {
        for scheduler in [Scheduler::Bucket, Scheduler::Mixed] {
            let report = run(scheduler, &config(4, 100, 2), &[(5, 30, 4), (7, 16, 2)]);
            assert_eq!(report.records[0].refusal, Some(Refusal::KvNeverFits));
            assert_eq!((report.records[1].arrival, report.records[1].end), (2, Some(2 + 110 * MS)));
        }
    }

    #[test]
    fn m08_idle_time_is_skipped_without_steps() {
        let hour = 3600 * 1000 * MS;
        let requests: Vec<_> = (0..10).map(|hours| (hours * hour, 128, 2)).collect();
        let report = run(Scheduler::Bucket, &config(2, 1024, 1024), &requests);
        assert_eq!(report.summary.steps, StepCounts { prefill: 10, decode: 10 });
        assert_eq!(times(&report), [(100, 110); 10]);
    }

    #[test]
    fn a_request_arriving_as_a_step_ends_is_seen_by_the_next_decision() {
        // Decode steps end at 110, 120, ... ms; the second request arrives at 130 ms, or 1 ns later.
        let config = config(2, 1024, 1024);
        let at_the_end = run(Scheduler::Bucket, &config, &[(0, 128, 9), (130 * MS, 128, 1)]);
        assert_eq!(times(&at_the_end)[1], (100, 100));
        let just_after = run(Scheduler::Bucket, &config, &[(0, 128, 9), (130 * MS + 1, 128, 1)]);
        assert_eq!(just_after.records[1].start, Some(140 * MS));
    }

    #[test]
    fn equal_arrivals_keep_the_order_of_the_workload() {
        let report =
            run(Scheduler::Bucket, &config(1, 1024, 1024), &[(9, 128, 1), (3, 128, 1), (9, 128, 1), (3, 128, 1)]);
        let starts: Vec<_> = report.records.iter().map(|record| record.start.unwrap() / MS).collect();
        assert_eq!(starts, [200, 0, 300, 100]);
    }

    #[test]
    fn a_mixed_step_takes_the_time_of_its_prompt_and_its_decodes() {
        // Steps: the prompt of A; the prompt of B with a decode of A; a decode of both.
        let report = run(Scheduler::Mixed, &config(2, 1024, 1024), &[(0, 128, 3), (50 * MS, 100, 2)]);
        assert_eq!(times(&report), [(100, 220), (160, 170)]);
        assert_eq!(report.summary.steps, StepCounts { prefill: 2, decode: 1 });
        let tokens = TokenCounts { prompt: 228, prompt_padded: 228, decode: 2, decode_padded: 2 };
        assert_eq!(report.summary.tokens, tokens);
        assert!(report.summary.prefill_padding.is_empty() && report.summary.decode_padding.is_empty());
        let steps = report.steps.unwrap();
        let second = steps.get(1).unwrap();
        assert_eq!((second.start / MS, second.end / MS, second.padded), (100, 210, 101));
    }

    #[test]
    fn waits_padding_and_steps_are_counted() {
        // One batch slot: B waits until A has finished, 100 + 10 + 10 ms.
        let report = run(Scheduler::Bucket, &config(1, 1024, 1024), &[(0, 100, 3), (0, 300, 1)]);
        assert_eq!(report.summary.wait_reasons_ms, [("slots", 120.0)]);
        let bucket = |real, padded, steps| Bucket { steps, real, padded };
        assert_eq!(report.summary.prefill_padding, [(128, bucket(100, 128, 1)), (512, bucket(300, 512, 1))]);
        assert_eq!(report.summary.decode_padding, [(1, bucket(2, 2, 2))]);
        let steps = report.steps.unwrap();
        let ends: Vec<u64> = steps.iter().map(|step| step.end / MS).collect();
        assert_eq!((ends, steps.get(4)), (vec![100, 110, 120, 220], None));
    }

    #[test]
    fn an_empty_workload_has_an_empty_report() {
        let report = run(Scheduler::Bucket, &config(1, 1024, 1024), &[]);
        assert_eq!((report.summary.makespan_s, report.summary.requests_per_s), (0.0, None));
        assert_eq!((report.summary.ttft_ms, report.steps.unwrap().len()), (None, 0));
    }

    #[test]
    fn a_clock_beyond_its_range_is_an_error() {
        let cost = Cost::constant(u64::MAX, 1);
        let requests = arrivals(&[(0, 1, 1)]);
        let outcome = replay(&requests, Scheduler::Bucket, &config(1, 64, 64), &cost, Options::default(), &mut |_| {
            ControlFlow::Continue(())
        });
        assert!(outcome.unwrap_err().to_string().starts_with("cost: "));
    }

    #[test]
    fn the_observer_can_stop_the_replay() {
        let requests = arrivals(&vec![(0, 16, 1); 5000]);
        let cost = Cost::constant(1, 1);
        let mut seen = Vec::new();
        let mut watch = |progress: Progress| {
            seen.push(progress);
            if progress.done > 2000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let outcome = replay(&requests, Scheduler::Bucket, &config(4, 64, 64), &cost, Options::default(), &mut watch);
        assert_eq!(outcome, Ok(None));
        assert_eq!(seen.iter().map(|progress| progress.done).collect::<Vec<_>>(), [1024, 2048]);
    }
}
