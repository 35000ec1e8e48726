//! The exclusive scheduler under the clock.

use std::sync::Arc;

use super::engine::{Added, Decision, Engine};
use super::{Arrival, Refusal};
use crate::config::Config;
use crate::error::Error;
use crate::exclusive::{ExclusiveScheduler, NewRequest, Options, Tokens};
use crate::request::Row;
use crate::step::{Kind, Step};

pub(super) struct Exclusive {
    scheduler: ExclusiveScheduler,
    max_model_len: u32,
    step: Option<Arc<Step>>,
}

impl Exclusive {
    pub(super) fn new(config: &Config) -> Self {
        Self { scheduler: ExclusiveScheduler::new(config), max_model_len: config.max_model_len, step: None }
    }

    fn planned(&self) -> Result<&Arc<Step>, Error> {
        self.step.as_ref().ok_or(Error::NotDue("no step was planned"))
    }
}

impl Engine for Exclusive {
    const PADS: bool = true;

    fn add(&mut self, arrival: &Arrival) -> Result<Added, Error> {
        let outputs = arrival.capped(self.max_model_len);
        let added = self.scheduler.add(NewRequest {
            prompt: arrival.prompt.clone(),
            max_tokens: outputs,
            priority: arrival.priority,
            stop_token_ids: [].into(),
        });
        match added {
            Ok(row) => Ok(Added::Accepted(row, outputs)),
            Err(error) => Refusal::of(error).map(Added::Refused),
        }
    }

    fn decide(&mut self) -> Result<Option<Decision>, Error> {
        let step = self.step.insert(self.scheduler.schedule(Options::default())?);
        let count = |rows: usize| u32::try_from(rows).expect("a batch has at most 2^31 rows");
        Ok(match step.kind() {
            Kind::Idle => None,
            Kind::Prefill => Some(Decision {
                prompt: (0..step.rows().len()).map(|row| step.tokens(row)).sum(),
                prompt_padded: step.padded_tokens(),
                decodes: 0,
                decodes_padded: 0,
            }),
            Kind::Decode => Some(Decision {
                prompt: 0,
                prompt_padded: 0,
                decodes: count(step.rows().len()),
                decodes_padded: step.num_seqs_padded(),
            }),
        })
    }

    fn entries(&self) -> impl Iterator<Item = (Row, u32)> {
        let rows = |step: &'_ Arc<Step>| step.rows().len();
        let step = self.step.as_ref();
        (0..step.map_or(0, rows)).filter_map(move |at| step.map(|step| (step.rows()[at], step.tokens(at))))
    }

    fn wait(&self) -> Option<&'static str> {
        self.scheduler.explain().map(|explanation| explanation.wait.name())
    }

    fn horizon(&self) -> u64 {
        u64::from(self.scheduler.decode_horizon())
    }

    fn complete(&mut self, times: u64, mut emitted: impl FnMut(Row, bool)) -> Result<(), Error> {
        let id = self.planned()?.id();
        let completion = if times == 1 {
            self.scheduler.complete(id, Tokens::LeftOut)?
        } else {
            self.scheduler.complete_decodes(id, in_range(times))?
        };
        for outcome in completion.outcomes() {
            emitted(outcome.row, outcome.finish.is_some());
        }
        Ok(())
    }

    fn pass(&mut self, times: u64) -> Result<(), Error> {
        let id = self.planned()?.id();
        self.scheduler.complete_decodes(id, in_range(times)).map(drop)
    }
}

fn in_range(times: u64) -> u32 {
    u32::try_from(times).expect("at most the horizon, which has 32 bits")
}
