//! `Gate`: the decision objects for vLLM's own scheduler, and the reading of its objects in one native pass.

use std::num::NonZeroU32;

use neuron_sched_core::decide::{self, Group, Head, Kind, PhaseInputs, Progress, Rules, Wait};
use neuron_sched_core::request::Row;
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use super::explanation::Explanation;
use crate::config::NeuronConfig;
use crate::error::to_py;
use crate::guard::Guarded;

/// The decisions of `BucketScheduler` for a scheduler that keeps its own queues and KV blocks.
///
/// It knows who holds a slot and blocks, by row handles that it gives out, and never sees a queue.
#[pyclass(frozen, module = "neuron_sched")]
pub(crate) struct Gate {
    core: Guarded<decide::Gate>,
    max_model_len: u32,
}

#[pymethods]
impl Gate {
    #[new]
    #[pyo3(signature = (config, groups, *, slots_max=u32::MAX, watermark=0, adaptive_threshold=false, decode_width=NonZeroU32::MIN))]
    fn new(
        config: &Bound<'_, NeuronConfig>,
        groups: Vec<(NonZeroU32, u32, Option<u32>)>,
        slots_max: u32,
        watermark: u32,
        adaptive_threshold: bool,
        decode_width: NonZeroU32,
    ) -> PyResult<Self> {
        let groups = groups
            .into_iter()
            .map(|(block_size, extra, blocks_max)| Group { block_size: block_size.get(), extra, blocks_max })
            .collect();
        let rules = Rules { slots_max, groups, watermark, adaptive_threshold, decode_width: decode_width.get() };
        let core = decide::Gate::new(config.get().core(), rules).map_err(|error| to_py(&error))?;
        Ok(Self { core: Guarded::new(core), max_model_len: config.get().core().max_model_len })
    }

    /// KV blocks that a request needs at worst.
    ///
    /// `ValueError` when it can never run: no prompt, one longer than `max_model_len`, or a worst case larger than
    /// the whole cache. A `session` may be continued, so its worst case is the longest sequence.
    #[pyo3(signature = (prompt, max_tokens, session=false))]
    fn need(&self, prompt: u64, max_tokens: u64, session: bool) -> PyResult<u32> {
        self.read(|core| core.need(prompt, max_tokens, session))?.map_err(|error| to_py(&error))
    }

    /// Reserves `need` blocks and a slot; returns the row handle.
    fn enter(&self, need: u32) -> PyResult<u64> {
        self.core.with(|core| core.enter(need).to_bits())
    }

    /// Gives a holder of blocks a slot, unless it has one; False for a stale handle.
    fn seat(&self, row: u64) -> PyResult<bool> {
        self.core.with(|core| core.seat(Row::from_bits(row)))
    }

    /// Takes the slot back and leaves the blocks; False for a stale handle.
    fn unseat(&self, row: u64) -> PyResult<bool> {
        self.core.with(|core| core.unseat(Row::from_bits(row)))
    }

    /// Takes back all that a row holds; False for a stale handle.
    fn leave(&self, row: u64) -> PyResult<bool> {
        self.core.with(|core| core.leave(Row::from_bits(row)))
    }

    /// Starts to choose the prompts of a step.
    fn begin(&self) -> PyResult<()> {
        self.core.with(decide::Gate::begin)
    }

    /// Why a request may not start now, as a stable name; None when it may.
    ///
    /// `rest`: tokens to compute, whatever the prefix cache holds; `requests`: those that run or wait, itself
    /// included; `row`: its handle where it holds blocks.
    #[pyo3(signature = (need, rest, requests, *, row=None, prefill_in_progress=false))]
    fn refuse(
        &self,
        need: u32,
        rest: u32,
        requests: usize,
        row: Option<u64>,
        prefill_in_progress: bool,
    ) -> PyResult<Option<&'static str>> {
        let head = Head { need, row: row.map(Row::from_bits), rest, requests, prefill_in_progress };
        Ok(self.read(|core| core.refuse(&head))?.map(Wait::name))
    }

    /// Counts a prompt among those of the step; False when it does not fit beside the others.
    fn pack(&self, rest: u32, requests: usize) -> PyResult<bool> {
        self.core.with(|core| core.pack(rest, requests))
    }

    /// Lets a prompt go that was counted but is not in the step after all.
    fn unpack(&self, rest: u32) -> PyResult<()> {
        self.core.with(|core| core.unpack(rest))
    }

    /// Most tokens of the step of which the prompt with `rest` to compute is the first.
    fn budget(&self, rest: u32, requests: usize) -> PyResult<u32> {
        self.core.with(|core| core.budget(rest, requests))
    }

    /// Chooses what the step does: `"prefill"`, `"decode"` or `"idle"`, and whether decodes that are owed came
    /// before a prefill.
    fn decide(&self, prefill_wanted: bool, decode_ready: bool, throttled: bool) -> PyResult<(&'static str, bool)> {
        let inputs = PhaseInputs { prefill_wanted, decode_ready, throttle_prefills: throttled };
        self.core.with(|core| {
            let decision = core.decide(inputs);
            (decision.kind.name(), decision.interleaved)
        })
    }

    /// Whether a prompt that may start would wait for decode steps that are owed.
    fn interleaves(&self, decode_ready: bool) -> PyResult<bool> {
        self.read(|core| core.interleaves(decode_ready))
    }

    /// Counts the chosen step, which ran as a prefill or as a decode.
    fn ran(&self, prefill: bool) -> PyResult<()> {
        self.core.with(|core| core.ran(if prefill { Kind::Prefill } else { Kind::Decode }))
    }

    /// Checks a prefill step; returns its padded counts and its bucket.
    ///
    /// `rows`: (id, whether prompt tokens are left, count). The last row carries the padding. `RuntimeError` names
    /// what breaks a rule.
    #[allow(clippy::needless_pass_by_value, reason = "a list is read into a vector")]
    fn pad_prefill<'py>(
        &self,
        py: Python<'py>,
        rows: Vec<(Bound<'py, PyString>, bool, i64)>,
    ) -> PyResult<(Bound<'py, PyDict>, u32)> {
        let names: Vec<String> = rows.iter().map(|(id, ..)| id.to_string()).collect();
        let counts: Vec<(bool, i64)> = rows.iter().map(|&(_, prefill, count)| (prefill, count)).collect();
        let found = self.read(|core| core.pad_prefill(&counts, |at| &names[at]))?;
        let (padded, bucket) = found.map_err(|error| to_py(&error))?;
        let dict = PyDict::new(py);
        for ((id, ..), count) in rows.iter().zip(padded) {
            dict.set_item(id, count)?;
        }
        Ok((dict, bucket))
    }

    /// Checks a decode step; returns a copy of its counts, which are never padded, and its bucket of rows.
    ///
    /// `prefilling`: ids of the prompts that are part done, none of which may be in the step. `RuntimeError` names
    /// what breaks a rule.
    fn pad_decode<'py>(
        &self,
        counts: &Bound<'py, PyDict>,
        prefilling: &Bound<'py, PyList>,
    ) -> PyResult<(Bound<'py, PyDict>, u32)> {
        let mut rows = Vec::with_capacity(counts.len());
        for (id, count) in counts.iter() {
            let prefill = !prefilling.is_empty() && prefilling.contains(&id)?;
            rows.push((prefill, count.extract::<i64>()?));
        }
        let padded = self.read(|core| core.pad_decode(rows.iter().copied(), |at| at))?;
        match padded {
            Ok(padded) => Ok((counts.copy()?, padded)),
            // Names are looked up only for a message: with the lock held nothing of Python's may run.
            Err(_) => Err(self.decode_fault(counts, &rows)?),
        }
    }

    /// Whether any of vLLM's running requests would get a token in step `step`; looks no further than the first.
    fn decode_ready(&self, running: &Bound<'_, PyList>, step: i64) -> PyResult<bool> {
        for request in running.iter() {
            if self.decodes(&request, step)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Why `id` waits, as `explain()` tells it.
    fn explanation(&self, id: Bound<'_, PyString>, reason: Bound<'_, PyString>, needed: u32) -> PyResult<Explanation> {
        let (reserved, usable) = self.read(|core| (core.ledger().reserved(), core.ledger().usable()))?;
        Ok(Explanation { id: id.unbind(), reason: reason.unbind(), needed, reserved, usable })
    }

    /// Requests that hold a slot.
    #[getter]
    fn seated(&self) -> PyResult<u32> {
        self.read(|core| core.ledger().seated())
    }

    /// KV blocks promised to requests.
    #[getter]
    fn reserved(&self) -> PyResult<u32> {
        self.read(|core| core.ledger().reserved())
    }

    /// KV blocks of the whole cache.
    #[getter]
    fn usable(&self) -> PyResult<u32> {
        self.read(|core| core.ledger().usable())
    }

    /// KV blocks of a sequence of `max_model_len`.
    #[getter]
    fn longest(&self) -> PyResult<u32> {
        self.read(decide::Gate::longest)
    }
}

impl Gate {
    /// The violation that the counts of a decode step hold, with the ids of its rows.
    fn decode_fault(&self, counts: &Bound<'_, PyDict>, rows: &[(bool, i64)]) -> PyResult<PyErr> {
        let names: Vec<String> = counts.keys().iter().map(|id| id.to_string()).collect();
        let found = self.read(|core| core.pad_decode(rows.iter().copied(), |at| &names[at]))?;
        Ok(found.map_or_else(|error| to_py(&error), |_| PyRuntimeError::new_err("a violation that is none")))
    }

    fn read<T>(&self, f: impl FnOnce(&decide::Gate) -> T) -> PyResult<T> {
        self.core.with(|core| f(core))
    }

    /// vLLM's counters of a request, read as it keeps them.
    fn decodes(&self, request: &Bound<'_, PyAny>, step: i64) -> PyResult<bool> {
        let py = request.py();
        let number = |name: &Bound<'_, PyString>| request.getattr(name)?.extract::<i64>();
        let drafts = request.getattr(intern!(py, "spec_token_ids"))?.len()?;
        let progress = Progress {
            computed: number(intern!(py, "num_computed_tokens"))?,
            tokens: number(intern!(py, "num_tokens"))?,
            drafts: i64::try_from(drafts).unwrap_or(i64::MAX),
            placeholders: number(intern!(py, "num_output_placeholders"))?,
            prompt: number(intern!(py, "num_prompt_tokens"))?,
            max_tokens: number(intern!(py, "max_tokens"))?,
            eligible_step: number(intern!(py, "next_decode_eligible_step"))?,
        };
        Ok(progress.decodes(step, self.max_model_len))
    }
}
