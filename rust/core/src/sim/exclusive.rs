//! The exclusive scheduler as an [`Engine`].

use super::engine::{Added, Decision, Engine};
use super::refusal::Refusal;
use super::workload::Arrival;
use crate::config::Config;
use crate::decide::Kind;
use crate::error::Error;
use crate::exclusive::{ExclusiveScheduler, NewRequest, Options, Tokens};
use crate::request::{Row, Sampling};

pub(super) struct Exclusive {
    scheduler: ExclusiveScheduler,
    max_model_len: u32,
}

impl Exclusive {
    pub(super) fn new(config: &Config) -> Self {
        Self { scheduler: ExclusiveScheduler::new(config), max_model_len: config.max_model_len }
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
            sampling: Sampling::default(),
        });
        match added {
            Ok(row) => Ok(Added::Accepted(row, outputs)),
            Err(error) => Refusal::of(error).map(Added::Refused),
        }
    }

    fn decide(&mut self) -> Result<Option<Decision>, Error> {
        let step = self.scheduler.schedule(Options::default())?;
        let (real, padded) = (step.total(), step.padded_tokens());
        Ok(match step.kind() {
            Kind::Idle => None,
            Kind::Prefill => Some(Decision { prompt: real, prompt_padded: padded, decodes: 0, decodes_padded: 0 }),
            Kind::Decode => Some(Decision { prompt: 0, prompt_padded: 0, decodes: real, decodes_padded: padded }),
        })
    }

    fn entries(&self) -> impl Iterator<Item = (Row, u32)> {
        let step = self.scheduler.due_step();
        step.into_iter().flat_map(|step| step.rows().iter().enumerate().map(|(at, &row)| (row, step.tokens(at))))
    }

    fn wait(&self) -> Option<&'static str> {
        self.scheduler.explain().map(|explanation| explanation.wait.name())
    }

    fn horizon(&self) -> u64 {
        u64::from(self.scheduler.decode_horizon())
    }

    fn complete(&mut self, times: u64, mut update: impl FnMut(Row, bool)) -> Result<(), Error> {
        let Some(step) = self.scheduler.due_step() else { return Err(Error::NotDue("no step was planned")) };
        let (id, kind) = (step.id(), step.kind());
        let completion = if times == 1 {
            self.scheduler.complete(id, Tokens::LeftOut)?
        } else {
            let times = u32::try_from(times).expect("at most the horizon, which has 32 bits");
            self.scheduler.complete_decodes(id, times)?
        };
        if kind == Kind::Decode {
            completion.finishes().for_each(|(row, _)| update(row, true));
        } else {
            completion.iter().for_each(|outcome| update(outcome.row, outcome.finish.is_some()));
        }
        Ok(())
    }
}
