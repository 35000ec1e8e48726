//! The token-budget scheduler against a slow reference model, over random histories. `PROPTEST_CASES` sets their
//! number.

use neuron_sched_core::error::Error;
use neuron_sched_core::mixed::{MixedScheduler, NewMixed, Progress};
use neuron_sched_core::request::Row;
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

/// A request of the reference model. Its name is its number in order of arrival.
#[derive(Clone, Debug)]
struct Req {
    name: usize,
    prompt_len: u64,
    max_new: u64,
    prefilled: u64,
    generated: u64,
}

impl Req {
    fn reservation(&self) -> u64 {
        self.prompt_len + self.max_new
    }
}

/// The reference model: lists and loops. Every derived value is computed when it is needed.
#[derive(Clone, Debug)]
struct Model {
    token_budget: u64,
    max_seqs: usize,
    kv_tokens: u64,
    added: usize,
    waiting: Vec<Req>,
    running: Vec<Req>,
    /// The plan of the last schedule, until it is completed.
    plan: Option<Vec<(usize, u64)>>,
    /// The answer of the last operation.
    answer: Answer,
}

#[derive(Clone, Debug, PartialEq)]
enum Answer {
    Nothing,
    Added(usize),
    Refused,
    Cancelled(Option<Progress>),
    Planned(Vec<(usize, u64)>),
    Completed(Vec<(usize, bool)>),
    NotDue,
}

#[derive(Clone, Debug)]
enum Operation {
    Add(NewMixed),
    Cancel(usize),
    Schedule,
    Complete,
    /// Schedule and complete, repeated this many times.
    Steps(u64),
}

impl Model {
    fn reserved(&self) -> u64 {
        self.running.iter().map(Req::reservation).sum()
    }

    fn add(&mut self, NewMixed { prompt_len, max_new, prefilled, generated }: NewMixed) -> Answer {
        if prompt_len + max_new > self.kv_tokens {
            return Answer::Refused;
        }
        let name = self.added;
        self.added += 1;
        self.waiting.push(Req { name, prompt_len, max_new, prefilled, generated });
        Answer::Added(name)
    }

    fn cancel(&mut self, name: usize) -> Answer {
        for queue in [&mut self.waiting, &mut self.running] {
            if let Some(i) = queue.iter().position(|req| req.name == name) {
                let Req { prefilled, generated, .. } = queue.remove(i);
                return Answer::Cancelled(Some(Progress { prefilled, generated }));
            }
        }
        Answer::Cancelled(None)
    }

    fn schedule(&mut self) -> Answer {
        let mut budget = self.token_budget;
        let mut plan = Vec::new();
        for req in self.running.iter().filter(|req| req.prefilled == req.prompt_len) {
            if budget > 0 {
                plan.push((req.name, 1));
                budget -= 1;
            }
        }
        for req in self.running.iter().filter(|req| req.prefilled < req.prompt_len) {
            let tokens = budget.min(req.prompt_len - req.prefilled);
            if tokens > 0 {
                plan.push((req.name, tokens));
                budget -= tokens;
            }
        }
        while budget > 0 && self.running.len() < self.max_seqs && !self.waiting.is_empty() {
            if self.reserved() + self.waiting[0].reservation() > self.kv_tokens {
                break;
            }
            let req = self.waiting.remove(0);
            let left = req.prompt_len - req.prefilled;
            let tokens = if left == 0 { 1 } else { budget.min(left) };
            plan.push((req.name, tokens));
            budget -= tokens;
            self.running.push(req);
        }
        self.plan = Some(plan.clone());
        Answer::Planned(plan)
    }

    fn complete(&mut self) -> Answer {
        let Some(plan) = self.plan.take() else { return Answer::NotDue };
        let mut emitted = Vec::new();
        for (name, tokens) in plan {
            let Some(req) = self.running.iter_mut().find(|req| req.name == name) else { continue };
            if req.prefilled < req.prompt_len {
                req.prefilled += tokens;
            }
            if req.prefilled == req.prompt_len {
                req.generated += 1;
                emitted.push((name, req.generated == req.max_new));
            }
        }
        self.running.retain(|req| req.generated < req.max_new);
        Answer::Completed(emitted)
    }
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Operation;

    fn init_state() -> BoxedStrategy<Self> {
        (1..=64_u64, 1..=8_usize, 4..=200_u64)
            .prop_map(|(token_budget, max_seqs, kv_tokens)| Self {
                token_budget,
                max_seqs,
                kv_tokens,
                added: 0,
                waiting: Vec::new(),
                running: Vec::new(),
                plan: None,
                answer: Answer::Nothing,
            })
            .boxed()
    }

    fn transitions(state: &Self) -> BoxedStrategy<Operation> {
        let most = (state.kv_tokens / 2).max(2);
        let sizes = (1..=most, 1..=most);
        let fresh = sizes.clone().prop_map(|(prompt_len, max_new)| (prompt_len, max_new, 0, 0));
        let partly_computed =
            sizes.prop_flat_map(|(prompt_len, max_new)| (Just(prompt_len), Just(max_new), 0..=prompt_len, 0..max_new));
        let add =
            prop_oneof![3 => fresh, 1 => partly_computed].prop_map(|(prompt_len, max_new, prefilled, generated)| {
                Operation::Add(NewMixed { prompt_len, max_new, prefilled, generated })
            });
        prop_oneof![
            5 => add,
            1 => (0..=state.added).prop_map(Operation::Cancel),
            3 => Just(Operation::Schedule),
            3 => Just(Operation::Complete),
            2 => (1..=12_u64).prop_map(Operation::Steps),
        ]
        .boxed()
    }

    fn apply(mut state: Self, operation: &Operation) -> Self {
        state.answer = match *operation {
            Operation::Add(request) => state.add(request),
            Operation::Cancel(name) => state.cancel(name),
            Operation::Schedule => state.schedule(),
            Operation::Complete => state.complete(),
            Operation::Steps(times) => {
                let mut answer = Answer::Nothing;
                for _ in 0..times {
                    state.schedule();
                    answer = state.complete();
                }
                answer
            }
        };
        state
    }
}

/// The scheduler under test, and the row of each name.
struct Subject {
    scheduler: MixedScheduler,
    rows: Vec<Row>,
}

impl Subject {
    fn name(&self, row: Row) -> usize {
        self.rows.iter().position(|&known| known == row).expect("a row that add returned")
    }

    fn schedule(&mut self) -> Answer {
        let plan = self.scheduler.schedule().to_vec();
        assert_eq!(self.scheduler.plan(), Some(plan.as_slice()));
        Answer::Planned(plan.iter().map(|planned| (self.name(planned.row), planned.tokens)).collect())
    }

    /// Complete `times` steps at once, at most the decode horizon.
    fn complete(&mut self, times: u64) -> Answer {
        match self.scheduler.complete_decodes(times).map(<[_]>::to_vec) {
            Ok(emitted) => Answer::Completed(emitted.iter().map(|e| (self.name(e.row), e.finished)).collect()),
            Err(Error::NotDue(_)) => Answer::NotDue,
            Err(error) => panic!("{error}"),
        }
    }

    /// Run `times` steps, and complete identical decode steps at once.
    fn steps(&mut self, mut times: u64) -> Answer {
        let mut answer = Answer::Nothing;
        while times > 0 {
            self.schedule();
            let jump = self.scheduler.decode_horizon().min(times);
            answer = self.complete(jump);
            times -= jump;
        }
        answer
    }
}

struct AgainstModel;

impl StateMachineTest for AgainstModel {
    type SystemUnderTest = Subject;
    type Reference = Model;

    fn init_test(model: &Model) -> Subject {
        let scheduler = MixedScheduler::new(model.token_budget, model.max_seqs as u64, model.kv_tokens);
        Subject { scheduler: scheduler.expect("all fields are in range"), rows: Vec::new() }
    }

    fn apply(mut subject: Subject, model: &Model, operation: Operation) -> Subject {
        let answer = match operation {
            Operation::Add(request) => match subject.scheduler.add(request) {
                Ok(row) => {
                    subject.rows.push(row);
                    Answer::Added(subject.rows.len() - 1)
                }
                Err(Error::NeverFits { .. }) => Answer::Refused,
                Err(error) => panic!("{error}"),
            },
            Operation::Cancel(name) => {
                let row = subject.rows.get(name).copied();
                Answer::Cancelled(row.and_then(|row| subject.scheduler.cancel(row)))
            }
            Operation::Schedule => subject.schedule(),
            Operation::Complete => subject.complete(1),
            Operation::Steps(times) => subject.steps(times),
        };
        assert_eq!(answer, model.answer);
        subject
    }

    fn check_invariants(subject: &Subject, model: &Model) {
        subject.scheduler.check().expect("all invariants hold");
        assert_eq!(subject.scheduler.reserved(), model.reserved());
        let names = |reqs: &[Req]| reqs.iter().map(|req| req.name).collect::<Vec<_>>();
        let waiting: Vec<usize> = subject.scheduler.waiting().map(|row| subject.name(row)).collect();
        let running: Vec<usize> = subject.scheduler.running().map(|row| subject.name(row)).collect();
        assert_eq!((waiting, running), (names(&model.waiting), names(&model.running)));
        for req in model.waiting.iter().chain(&model.running) {
            let progress = Progress { prefilled: req.prefilled, generated: req.generated };
            assert_eq!(subject.scheduler.progress(subject.rows[req.name]), Some(progress));
        }
    }

    /// Check that every accepted request finishes.
    fn teardown(mut subject: Subject, model: Model) {
        let work: u64 = model.waiting.iter().chain(&model.running).map(Req::reservation).sum();
        subject.steps(work + 1);
        assert_eq!(subject.scheduler.num_waiting() + subject.scheduler.num_running(), 0);
        assert_eq!(subject.scheduler.reserved(), 0);
    }
}

prop_state_machine! {
    #[test]
    fn x02_plans_emissions_and_reservations_equal_the_model(sequential 1..120 => AgainstModel);
}
