//! Replays of random workloads: completing a run of identical steps at once gives the same report as completing them
//! one by one, and the report agrees with the recorded steps.

use std::ops::ControlFlow;

use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::decide::Kind;
use neuron_sched_core::request::Prompt;
use neuron_sched_core::sim::{Arrival, Cost, Distribution, Options, Report, Scheduler, replay};
use proptest::prelude::*;

fn arrivals() -> impl Strategy<Value = Vec<Arrival>> {
    // Few distinct times, so that arrivals often coincide with each other and with the ends of steps.
    let at = prop_oneof![0..40u64, (0..40u64).prop_map(|at| at * 10)];
    let prompt = prop_oneof![
        (1..140u32).prop_map(Prompt::Length),
        (0..3u64, 1..140u32).prop_map(|(id, length)| Prompt::Segments { ids: [id].into(), length }),
    ];
    let arrival = (at, prompt, 1..60u32, 0..3i64).prop_map(|(at, prompt, outputs, priority)| Arrival {
        at,
        prompt,
        outputs,
        priority,
    });
    prop::collection::vec(arrival, 0..25)
}

fn configs() -> impl Strategy<Value = Config> {
    let limits = (1..6i64, 16..100i64, 20..130i64, 1..9i64, 4..60i64);
    let knobs = (1..3i64, prop::option::of(1..3i64), 1..4i64, any::<bool>(), any::<bool>(), any::<bool>());
    (limits, knobs).prop_map(|((seqs, tokens, len, block_size, blocks), knobs)| {
        let (prefills, consecutive, decodes, prefix_caching, priority, bucket) = knobs;
        let raw = RawConfig {
            max_num_seqs: Some(seqs),
            max_num_batched_tokens: Some(tokens),
            max_model_len: Some(len),
            block_size: Some(block_size),
            num_blocks: Some(blocks),
            max_prefills_per_batch: Some(prefills),
            max_consecutive_prefill_steps: consecutive,
            min_decode_steps: Some(decodes),
            prefix_caching: Some(prefix_caching),
            policy: Some(if priority { "priority" } else { "fcfs" }.into()),
            chunking: Some(if bucket { "bucket" } else { "fixed" }.into()),
            ..RawConfig::default()
        };
        Config::resolve(&raw).unwrap()
    })
}

fn costs() -> impl Strategy<Value = Cost> {
    prop_oneof![
        Just(Cost::constant(10, 3)),
        Just(Cost::constant(7, 0)),
        Just(Cost::table(&[(1, 2), (64, 30)], &[(1, 5), (4, 6)]).unwrap()),
    ]
}

fn run(workload: &[Arrival], scheduler: Scheduler, config: &Config, cost: &Cost, one_by_one: bool) -> Report {
    let options = Options { record_steps: true, one_by_one };
    replay(workload, scheduler, config, cost, options, &mut |_| ControlFlow::Continue(())).unwrap().unwrap()
}

/// Return the start and the times of the tokens of each request, computed from the recorded steps.
fn walk(workload: &[Arrival], report: &Report) -> Vec<(Option<u64>, Vec<u64>)> {
    let mut found = vec![(None, Vec::new()); workload.len()];
    let mut computed = vec![0; workload.len()];
    for step in report.steps.as_ref().unwrap().iter() {
        for entry in step.entries {
            let request = entry.request as usize;
            let (start, emitted) = &mut found[request];
            start.get_or_insert(step.start);
            computed[request] += entry.tokens as usize;
            let outputs = report.records[request].outputs as usize;
            // With prefix caching off, `computed` counts every prompt token.
            if computed[request] >= workload[request].prompt.len() && emitted.len() < outputs {
                emitted.push(step.end);
            }
        }
    }
    found
}

/// Check that `found` is the distribution of `times`, computed in whole hundredths of a nanosecond.
fn close(found: Option<Distribution>, mut times: Vec<u64>) -> Result<(), TestCaseError> {
    times.sort_unstable();
    let Some(found) = found else {
        prop_assert!(times.is_empty());
        return Ok(());
    };
    let (count, last) = (times.len() as u64, times.len() - 1);
    let percentile = |percent: usize| {
        let (below, share) = (last * percent / 100, (last * percent % 100) as u64);
        100 * times[below] + (times[(below + 1).min(last)] - times[below]) * share
    };
    let hundredths = [percentile(50), percentile(90), percentile(99), percentile(100)];
    for (ms, expected) in [found.p50, found.p90, found.p99, found.max].into_iter().zip(hundredths) {
        prop_assert!((ms * 1e8 - exact(expected)).abs() < 1e-4, "{found:?} of {times:?}");
    }
    let total: u64 = times.iter().sum();
    prop_assert!((found.mean * 1e6 * exact(count) - exact(total)).abs() < 1e-4, "{found:?} of {times:?}");
    Ok(())
}

fn exact(number: u64) -> f64 {
    f64::from(u32::try_from(number).expect("the times are small"))
}

proptest! {
    #[test]
    fn runs_of_identical_steps_keep_the_report(workload in arrivals(), config in configs(), cost in costs()) {
        for scheduler in [Scheduler::Bucket, Scheduler::Mixed] {
            let jumped = run(&workload, scheduler, &config, &cost, false);
            let stepped = run(&workload, scheduler, &config, &cost, true);
            prop_assert_eq!(&jumped, &stepped);
        }
    }

    #[test]
    fn the_report_agrees_with_the_recorded_steps(workload in arrivals(), config in configs(), cost in costs()) {
        let config = Config { prefix_caching: false, ..config };
        for scheduler in [Scheduler::Bucket, Scheduler::Mixed] {
            let report = run(&workload, scheduler, &config, &cost, false);
            let found = walk(&workload, &report);
            let (mut first, mut end, mut queue, mut gaps) = (vec![], vec![], vec![], vec![]);
            for ((start, emitted), record) in found.iter().zip(&report.records) {
                prop_assert_eq!(emitted.len(), record.outputs as usize);
                prop_assert_eq!(*start, record.start);
                prop_assert_eq!((emitted.first(), emitted.last()), (record.first_token.as_ref(), record.end.as_ref()));
                prop_assert_eq!(record.refusal.is_some(), start.is_none());
                let Some(start) = start else { continue };
                first.push(emitted[0] - record.arrival);
                end.push(emitted[emitted.len() - 1] - record.arrival);
                queue.push(start - record.arrival);
                gaps.extend(emitted.windows(2).map(|pair| pair[1] - pair[0]));
            }
            let summary = &report.summary;
            close(summary.ttft_ms, first)?;
            close(summary.e2e_ms, end)?;
            close(summary.queue_ms, queue)?;
            close(summary.itl_ms, gaps)?;
            let steps = report.steps.as_ref().unwrap();
            let count = |kind| steps.iter().filter(|step| step.kind == kind).count() as u64;
            prop_assert_eq!((summary.steps.prefill, summary.steps.decode), (count(Kind::Prefill), count(Kind::Decode)));
            let total: u64 = steps.iter().flat_map(|step| step.entries).map(|entry| u64::from(entry.tokens)).sum();
            let decodes = steps.iter().filter(|step| step.kind == Kind::Decode);
            let rows: u64 = decodes.flat_map(|step| step.entries).map(|entry| u64::from(entry.tokens)).sum();
            prop_assert_eq!(summary.tokens.decode, rows);
            if scheduler == Scheduler::Bucket {
                let padded: u64 = steps.iter().map(|step| u64::from(step.padded)).sum();
                prop_assert_eq!(summary.tokens.prompt + summary.tokens.decode, total);
                prop_assert_eq!(summary.tokens.prompt_padded + summary.tokens.decode_padded, padded);
                let buckets = summary.prefill_padding.iter().chain(&summary.decode_padding);
                prop_assert_eq!(buckets.clone().map(|(_, bucket)| bucket.padded).sum::<u64>(), padded);
                prop_assert_eq!(buckets.clone().map(|(_, bucket)| bucket.real).sum::<u64>(), total);
                prop_assert_eq!(buckets.map(|(_, bucket)| bucket.steps).sum::<u64>(), steps.len());
            }
        }
    }
}
