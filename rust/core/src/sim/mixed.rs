//! The token-budget scheduler as an [`Engine`].

use super::engine::{Added, Decision, Engine};
use super::refusal::Refusal;
use super::workload::Arrival;
use crate::config::Config;
use crate::error::Error;
use crate::mixed::{Emitted, MixedScheduler, NewMixed, Planned, Wait};
use crate::request::Row;

pub(super) struct Mixed {
    scheduler: MixedScheduler,
    max_model_len: u32,
    /// Whether a request decodes, by row index.
    decodes: Vec<bool>,
}

impl Mixed {
    pub(super) fn new(config: &Config) -> Result<Self, Error> {
        let kv_tokens = u64::from(config.num_blocks) * u64::from(config.block_size);
        let (budget, seqs) = (config.max_num_batched_tokens, config.max_num_seqs);
        let scheduler = MixedScheduler::new(budget.into(), seqs.into(), kv_tokens)?;
        Ok(Self { scheduler, max_model_len: config.max_model_len, decodes: Vec::new() })
    }
}

impl Engine for Mixed {
    const PADS: bool = false;

    fn add(&mut self, arrival: &Arrival) -> Result<Added, Error> {
        let prompt = arrival.prompt.len() as u64;
        if prompt > self.max_model_len.into() {
            return Ok(Added::Refused(Refusal::PromptTooLong));
        }
        let outputs = arrival.capped(self.max_model_len);
        let request = NewMixed { prompt_len: prompt, max_new: outputs.into(), prefilled: 0, generated: 0 };
        match self.scheduler.add(request) {
            Ok(row) => {
                if self.decodes.len() <= row.index() {
                    self.decodes.resize(row.index() + 1, false);
                }
                self.decodes[row.index()] = false;
                Ok(Added::Accepted(row, outputs))
            }
            Err(error) => Refusal::of(error).map(Added::Refused),
        }
    }

    fn decide(&mut self) -> Result<Option<Decision>, Error> {
        let plan = self.scheduler.schedule();
        if plan.is_empty() {
            return Ok(None);
        }
        // The decodes of a plan precede its prefills.
        let decodes = plan.partition_point(|planned| self.decodes[planned.row.index()]);
        let prompt = count(plan[decodes..].iter().map(|planned| planned.tokens).sum());
        let decodes = count(decodes as u64);
        Ok(Some(Decision { prompt, prompt_padded: prompt, decodes, decodes_padded: decodes }))
    }

    fn entries(&self) -> impl Iterator<Item = (Row, u32)> {
        let plan: &[Planned] = self.scheduler.plan().unwrap_or_default();
        plan.iter().map(|planned| (planned.row, count(planned.tokens)))
    }

    fn wait(&self) -> Option<&'static str> {
        self.scheduler.head_wait().map(Wait::name)
    }

    fn horizon(&self) -> u64 {
        self.scheduler.decode_horizon()
    }

    fn complete(&mut self, times: u64, mut update: impl FnMut(Row, bool)) -> Result<(), Error> {
        let completed = if times == 1 { self.scheduler.complete()? } else { self.scheduler.complete_decodes(times)? };
        for &Emitted { row, finished } in completed {
            let first = !std::mem::replace(&mut self.decodes[row.index()], true);
            if first || finished {
                update(row, finished);
            }
        }
        Ok(())
    }
}

/// Return a number of tokens in one step as `u32`: it is at most the token budget, which has 32 bits.
fn count(tokens: u64) -> u32 {
    u32::try_from(tokens).expect("at most the token budget")
}
