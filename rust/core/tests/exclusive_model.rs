//! The exclusive scheduler against a slow reference model, over random histories.
//!
//! `PROPTEST_CASES=100000 cargo nextest run --release -p neuron-sched-core exclusive_model` runs 100,000 histories.

mod model;

use std::collections::BTreeMap;
use std::sync::Arc;

use neuron_sched_core::config::Config;
use neuron_sched_core::decide::{Kind, Step};
use neuron_sched_core::exclusive::{
    Completion, ExclusiveScheduler, Finish, NewRequest, Options, Status as ViewStatus, Tokens,
};
use neuron_sched_core::request::{Prompt, Row, Sampling, UNKNOWN_TOKEN};
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use model::cases::Scale;
use model::{Emitted, Model, Status};

/// A call of the scheduler.
#[derive(Clone, Debug)]
enum Call {
    Add {
        prompt: Prompt,
        max_tokens: u32,
        priority: i64,
        stop: Vec<u32>,
    },
    Schedule {
        throttle: bool,
        ahead: bool,
    },
    /// Complete the step that is due, with these token ids repeated over its rows, or without ids.
    Complete {
        tokens: Option<Vec<u32>>,
    },
    /// Complete the step that is due with invalid tokens.
    CompleteInvalid {
        tokens: Vec<Option<u32>>,
    },
    /// Complete the step that is due and at most `times - 1` identical steps after it.
    CompleteDecodes {
        times: u32,
    },
    Cancel {
        request: usize,
    },
}

/// The model, and its answer to the last call.
#[derive(Clone, Debug)]
struct Reference {
    scale: Scale,
    model: Model,
    accepted: bool,
    emitted: Vec<Emitted>,
    /// The tokens argument of the last completion.
    tokens: Option<Vec<Option<u32>>>,
    /// Whether a request was added or ended since the step in flight was planned.
    changed: bool,
    /// Number of decode steps that the last call completed at once.
    completed: u32,
}

impl Reference {
    /// Return the tokens argument for the step that is due: a token for each emitting row.
    fn entries(&self, ids: &[u32]) -> Vec<Option<u32>> {
        let rows = self.model.in_flight[0].rows.iter().enumerate();
        rows.map(|(at, row)| row.emits.then(|| ids[at % ids.len()])).collect()
    }

    /// Return the number of identical decode steps guaranteed to follow, at most `most`, found by running a copy of the
    /// model.
    fn repeats(&self, most: u32) -> u32 {
        let in_flight = &self.model.in_flight;
        if self.changed || in_flight.len() > 1 || in_flight[0].contested {
            return 1;
        }
        let mut model = self.model.clone();
        let first: Vec<usize> = model.in_flight[0].rows.iter().map(|row| row.request).collect();
        let mut times = 0;
        while times < most && model.in_flight[0].kind == Kind::Decode {
            if !model.in_flight[0].rows.iter().map(|row| row.request).eq(first.iter().copied()) {
                break;
            }
            times += 1;
            model.complete(None);
            model.schedule(false, false);
        }
        times
    }
}

impl ReferenceStateMachine for Reference {
    type State = Self;
    type Transition = Call;

    fn init_state() -> BoxedStrategy<Self> {
        let start = |(scale, config)| Self {
            scale,
            model: Model::new(config),
            accepted: false,
            emitted: Vec::new(),
            tokens: None,
            changed: false,
            completed: 0,
        };
        model::cases::configs().prop_map(start).boxed()
    }

    fn transitions(state: &Self) -> BoxedStrategy<Call> {
        let config = &state.model.config;
        let prompts = model::cases::prompts(state.scale, config.max_model_len);
        let stop = proptest::collection::vec(2..5_u32, 0..2);
        let add = (prompts, prop_oneof![1..=3_u32, 1..=config.max_model_len], -2..=2_i64, stop)
            .prop_map(|(prompt, max_tokens, priority, stop)| Call::Add { prompt, max_tokens, priority, stop });
        let throttle = proptest::bool::weighted(0.1);
        let schedule = throttle.prop_map(|throttle| Call::Schedule { throttle, ahead: false }).boxed();
        let ahead = throttle.prop_map(|throttle| Call::Schedule { throttle, ahead: true });
        let cancel = (0..state.model.requests.len().max(1)).prop_map(|request| Call::Cancel { request });
        // Tokens from 2 can be stop tokens. They are rare, so that most requests run to their length.
        let token = prop_oneof![12 => 0..2_u32, 1 => 2..5_u32];
        let ids = proptest::collection::vec(token.clone(), 1..5);
        let complete = proptest::option::weighted(0.7, ids).prop_map(|tokens| Call::Complete { tokens });
        let invalid = proptest::collection::vec(proptest::option::of(token), 0..4);
        let invalid = invalid.prop_map(|tokens| Call::CompleteInvalid { tokens });
        let decodes = (1..6_u32).prop_map(|times| Call::CompleteDecodes { times });
        if state.model.in_flight.is_empty() {
            prop_oneof![6 => add, 8 => schedule, 2 => ahead, 1 => cancel].boxed()
        } else {
            prop_oneof![3 => add, 1 => schedule, 4 => ahead, 10 => complete, 3 => decodes, 1 => invalid, 1 => cancel]
                .boxed()
        }
    }

    fn preconditions(state: &Self, call: &Call) -> bool {
        let due = state.model.in_flight.first();
        let needs_tokens = |step: &model::Step| {
            step.rows.iter().any(|row| {
                let request = &state.model.requests[row.request];
                row.emits && request.needs_tokens() && request.status == Status::Running
            })
        };
        match call {
            Call::Add { .. } | Call::Schedule { .. } => true,
            Call::Cancel { request } => *request < state.model.requests.len(),
            Call::Complete { tokens } => due.is_some_and(|step| tokens.is_some() || !needs_tokens(step)),
            Call::CompleteInvalid { tokens } => due.is_some() && !state.model.accepts(Some(tokens)),
            Call::CompleteDecodes { .. } => due.is_some_and(|step| step.kind == Kind::Decode && !needs_tokens(step)),
        }
    }

    fn apply(mut state: Self, call: &Call) -> Self {
        match call {
            Call::Add { prompt, max_tokens, priority, stop } => {
                state.accepted = state.model.add(prompt.clone(), *max_tokens, *priority, stop.clone());
                state.changed = true;
            }
            &Call::Schedule { throttle, ahead } => {
                let only_step = !ahead || state.model.in_flight.is_empty();
                state.accepted = state.model.schedule(throttle, ahead).is_some();
                state.changed &= !only_step;
            }
            Call::Complete { tokens } => {
                state.tokens = tokens.as_ref().map(|ids| state.entries(ids));
                state.emitted = state.model.complete(state.tokens.as_deref());
                state.changed = true;
            }
            Call::CompleteInvalid { .. } => {}
            &Call::CompleteDecodes { times } => {
                let times = state.repeats(times);
                state.completed = times;
                for more in (0..times).rev() {
                    state.emitted = state.model.complete(None);
                    if more > 0 {
                        state.model.schedule(false, false);
                    }
                }
                state.changed = true;
            }
            Call::Cancel { request } => {
                state.accepted = state.model.cancel(*request);
                state.changed = true;
            }
        }
        state
    }
}

/// The scheduler under test, and the rows of the model's requests.
struct Subject {
    scheduler: ExclusiveScheduler,
    rows: Vec<Row>,
    /// Steps in flight, the one that is due first.
    steps: Vec<Arc<Step>>,
    changed: bool,
}

impl Subject {
    fn new(config: &Config) -> Self {
        Self { scheduler: ExclusiveScheduler::new(config), rows: Vec::new(), steps: Vec::new(), changed: false }
    }

    fn numbers(&self, rows: impl IntoIterator<Item = Row>) -> Vec<usize> {
        let numbers: BTreeMap<Row, usize> = self.rows.iter().enumerate().map(|(number, &row)| (row, number)).collect();
        rows.into_iter().map(|row| numbers[&row]).collect()
    }

    fn add(&mut self, prompt: &Prompt, max_tokens: u32, priority: i64, stop: &[u32]) -> bool {
        let stop_token_ids = stop.into();
        let request =
            NewRequest { prompt: prompt.clone(), max_tokens, priority, stop_token_ids, sampling: Sampling::default() };
        let row = self.scheduler.add(request);
        self.rows.extend(row.clone());
        row.is_ok()
    }

    fn schedule(&mut self, throttle_prefills: bool, ahead: bool) -> bool {
        let step = self.scheduler.schedule(Options { throttle_prefills, ahead }).map(Arc::clone);
        if step.is_ok() && !ahead {
            self.steps.clear();
        }
        self.steps.extend(step.clone());
        step.is_ok()
    }

    /// Complete the step that is due, and check that no other step can be completed.
    fn complete(&mut self, tokens: Tokens<'_>, repeats: Option<u32>) -> Arc<Completion> {
        let step = self.steps.remove(0);
        for other in [step.id() + 1, step.id().wrapping_sub(1)] {
            assert!(self.scheduler.complete(other, tokens).is_err(), "only the oldest step in flight is due");
        }
        let completion = match repeats {
            None => self.scheduler.complete(step.id(), tokens),
            Some(times) => self.scheduler.complete_decodes(step.id(), times),
        };
        let completion = completion.map(Arc::clone);
        assert!(self.scheduler.complete(step.id(), tokens).is_err(), "a step is completed once");
        completion.expect("the step is due")
    }

    fn assert_step(&self, step: &Step, expected: &model::Step) {
        assert_eq!((step.kind(), step.padded_tokens()), (expected.kind, expected.padded_tokens));
        assert_eq!(step.num_seqs_padded(), if step.kind() == Kind::Decode { expected.padded_tokens } else { 0 });
        assert_eq!(self.numbers(step.finished().iter().copied()), expected.finished);
        let requests: Vec<usize> = expected.rows.iter().map(|row| row.request).collect();
        assert_eq!(self.numbers(step.rows().iter().copied()), requests);
        for (at, row) in expected.rows.iter().enumerate() {
            let planned = (step.tokens(at), step.padded(at), step.computed(at), step.emits(at));
            assert_eq!(planned, (row.tokens, row.padded, row.computed, row.emits), "row {at} of {step:?}");
            assert_eq!(self.scheduler.step_blocks(step, at), Some(&row.blocks[..]), "row {at} of {step:?}");
        }
    }

    fn assert_emitted(&self, completion: &Completion, expected: &[Emitted]) {
        let rows = self.numbers(completion.iter().map(|outcome| outcome.row));
        let emitted = rows.iter().zip(completion.iter());
        let emitted: Vec<Emitted> = emitted
            .map(|(&request, outcome)| Emitted { request, token: outcome.token, finish: outcome.finish })
            .collect();
        assert_eq!(emitted, expected);
        let finishes: Vec<(usize, Finish)> =
            expected.iter().filter_map(|emitted| Some((emitted.request, emitted.finish?))).collect();
        let (ended, why): (Vec<Row>, Vec<Finish>) = completion.finishes().unzip();
        assert_eq!(self.numbers(ended).into_iter().zip(why).collect::<Vec<_>>(), finishes);
    }

    fn assert_request(&self, row: Row, expected: &model::Request) {
        let view = self.scheduler.view(row);
        if expected.status == Status::Reported {
            return;
        }
        let view = view.expect("a request can be viewed until its end is reported");
        let status = match expected.status {
            Status::Waiting => ViewStatus::Waiting,
            Status::Running if expected.computed < expected.length() => ViewStatus::Prefill,
            Status::Running => ViewStatus::Decode,
            Status::Finished(finish) => ViewStatus::Finished(finish),
            Status::Cancelled | Status::Reported => ViewStatus::Cancelled,
        };
        let emitted = u32::try_from(expected.outputs.len()).unwrap();
        assert_eq!((view.status, view.computed, view.generated), (status, expected.computed, emitted));
        assert_eq!(view.blocks, expected.blocks);
        let known = |at: usize| view.outputs.get(at).copied().filter(|&id| id != UNKNOWN_TOKEN);
        assert!(view.outputs.len() <= expected.outputs.len());
        assert!(expected.outputs.iter().enumerate().all(|(at, &id)| known(at) == id), "{:?}", view.outputs);
    }
}

struct ExclusiveModel;

impl StateMachineTest for ExclusiveModel {
    type SystemUnderTest = Subject;
    type Reference = Reference;

    fn init_test(state: &Reference) -> Subject {
        Subject::new(&state.model.config)
    }

    fn apply(mut subject: Subject, state: &Reference, call: Call) -> Subject {
        match call {
            Call::Add { prompt, max_tokens, priority, stop } => {
                assert_eq!(subject.add(&prompt, max_tokens, priority, &stop), state.accepted);
            }
            Call::Schedule { throttle, ahead } => {
                assert_eq!(subject.schedule(throttle, ahead), state.accepted);
                if state.accepted {
                    let planned = subject.steps.last().expect("just planned");
                    subject.assert_step(planned, state.model.in_flight.last().expect("just planned"));
                    let idle = state.model.in_flight.len() == 1 && planned.kind() == Kind::Idle;
                    let live = subject.scheduler.num_running() + subject.scheduler.num_waiting();
                    assert!(!idle || live == 0, "an idle step while a request could run");
                }
            }
            Call::Complete { .. } => {
                let tokens = state.tokens.as_deref().map_or(Tokens::LeftOut, Tokens::Given);
                let completion = subject.complete(tokens, None);
                subject.assert_emitted(&completion, &state.emitted);
            }
            Call::CompleteInvalid { tokens } => {
                let due = subject.steps[0].id();
                assert!(subject.scheduler.complete(due, Tokens::Given(&tokens)).is_err());
            }
            Call::CompleteDecodes { times } => {
                let horizon = subject.scheduler.decode_horizon();
                assert!(subject.steps.len() == 1 || horizon == 1, "a step ahead limits the horizon to 1");
                let times = if subject.changed { 1 } else { times.min(horizon) };
                assert_eq!(times, state.completed, "the horizon is {horizon}");
                let completion = subject.complete(Tokens::LeftOut, Some(times));
                subject.assert_emitted(&completion, &state.emitted);
            }
            Call::Cancel { request } => assert_eq!(subject.scheduler.cancel(subject.rows[request]), state.accepted),
        }
        subject.changed = state.changed;
        subject
    }

    fn check_invariants(subject: &Subject, state: &Reference) {
        let (scheduler, model) = (&subject.scheduler, &state.model);
        assert_eq!(scheduler.check(), Ok(()));
        assert_eq!((scheduler.num_waiting(), scheduler.num_running()), (model.num_waiting(), model.running.len()));
        assert_eq!(scheduler.free_blocks() as usize, model.pool.free.len());
        assert_eq!((scheduler.reserved_blocks(), scheduler.state()), (model.reserved(), model.state));
        for (&row, request) in subject.rows.iter().zip(&model.requests) {
            subject.assert_request(row, request);
        }
        for (step, expected) in subject.steps.iter().zip(&model.in_flight) {
            subject.assert_step(step, expected);
        }
        let explained = scheduler.explain().map(|explanation| {
            let head = subject.numbers([explanation.row])[0];
            let counts = (explanation.needed, explanation.reserved, explanation.usable);
            assert_eq!(counts, model.explanation_counts(head));
            (head, explanation.wait)
        });
        assert_eq!(explained, model.explain());
    }

    /// Check that every accepted request ends.
    fn teardown(mut subject: Subject, mut state: Reference) {
        let mut calls = 0;
        while state.model.num_waiting() + state.model.running.len() > 0 {
            let call = Call::Schedule { throttle: false, ahead: false };
            state = Reference::apply(state, &call);
            subject = Self::apply(subject, &state, call);
            let call = Call::Complete { tokens: Some(vec![0]) };
            state = Reference::apply(state, &call);
            subject = Self::apply(subject, &state, call);
            Self::check_invariants(&subject, &state);
            calls += 1;
            assert!(calls < 100_000, "a request never ends");
        }
        let ended = |request: &model::Request| !matches!(request.status, Status::Waiting | Status::Running);
        assert!(state.model.requests.iter().all(ended));
        assert_eq!(subject.scheduler.free_blocks(), state.model.config.num_blocks);
    }
}

prop_state_machine! {
    // A call that is not allowed at its position of a history is left out, which is not limited in number.
    #![proptest_config(ProptestConfig { max_local_rejects: u32::MAX, ..ProptestConfig::default() })]

    #[test]
    fn exclusive_model(sequential 1..60 => ExclusiveModel);
}
