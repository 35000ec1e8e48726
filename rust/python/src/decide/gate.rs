//! `Gate`: the core's decisions for a vLLM scheduler. vLLM's requests are read natively, in one pass.

use std::num::NonZeroU32;

use neuron_sched_core::decide::{self, Head, Kind, KvGroup, PhaseInputs, Progress, Rules, Wait};
use neuron_sched_core::request::Row;
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use super::explanation::Explanation;
use crate::config::NeuronConfig;
use crate::error::to_py;
use crate::guard::Guarded;

/// Scheduling decisions for the vLLM classes, without a queue and without KV blocks; internal.
///
/// A request is identified by the row handle that `admit` returns.
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
            .map(|(block_size, extra, blocks_max)| KvGroup { block_size: block_size.get(), extra, blocks_max })
            .collect();
        let rules = Rules { slots_max, groups, watermark, adaptive_threshold, decode_width: decode_width.get() };
        let core = decide::Gate::new(config.get().core(), rules).map_err(|error| to_py(&error))?;
        Ok(Self { core: Guarded::new(core), max_model_len: config.get().core().max_model_len })
    }

    /// Return the worst case of a request in KV blocks.
    ///
    /// The worst case of a `session` is the longest sequence, because a later prompt may continue it. Raise
    /// `ValueError` if the request can never run: no prompt, a prompt longer than `max_model_len`, or a worst case
    /// larger than the whole KV cache.
    #[pyo3(signature = (prompt, max_tokens, session=false))]
    fn needed_blocks(&self, prompt: u64, max_tokens: u64, session: bool) -> PyResult<u32> {
        self.read(|core| core.needed_blocks(prompt, max_tokens, session))?.map_err(|error| to_py(&error))
    }

    /// Reserve `needed_blocks` KV blocks and a batch slot for a request, and return its row handle.
    fn admit(&self, needed_blocks: u32) -> PyResult<u64> {
        self.core.with(|core| core.admit(needed_blocks).to_bits())
    }

    /// Give a request a batch slot, unless it has one. Return `False` for a stale handle.
    fn take_slot(&self, row: u64) -> PyResult<bool> {
        self.core.with(|core| core.take_slot(Row::from_bits(row)))
    }

    /// Free the batch slot of a request and keep its reservation. Return `False` for a stale handle.
    fn free_slot(&self, row: u64) -> PyResult<bool> {
        self.core.with(|core| core.free_slot(Row::from_bits(row)))
    }

    /// Release the reservation and the batch slot of a request. Return `False` for a stale handle.
    fn release(&self, row: u64) -> PyResult<bool> {
        self.core.with(|core| core.release(Row::from_bits(row)))
    }

    /// Start to select the prompts of a step.
    fn begin(&self) -> PyResult<()> {
        self.core.with(decide::Gate::begin)
    }

    /// Return the stable name of the reason why a request is not admitted now, or `None` if it fits.
    ///
    /// `rest` is the number of prompt tokens to compute, prefix-cache hits not deducted; `num_requests` the number of
    /// running and waiting requests, including this one; `row` the handle of a request that has a reservation already.
    #[pyo3(signature = (needed_blocks, rest, num_requests, *, row=None, prefill_in_progress=false))]
    fn refuse(
        &self,
        needed_blocks: u32,
        rest: u32,
        num_requests: usize,
        row: Option<u64>,
        prefill_in_progress: bool,
    ) -> PyResult<Option<&'static str>> {
        let head = Head { needed_blocks, row: row.map(Row::from_bits), rest, num_requests, prefill_in_progress };
        Ok(self.read(|core| core.refuse(&head))?.map(Wait::name))
    }

    /// Add a prompt to the step. Return `False` if the step's token or row capacity is exhausted.
    fn pack(&self, rest: u32, num_requests: usize) -> PyResult<bool> {
        self.core.with(|core| core.pack(rest, num_requests))
    }

    /// Remove a prompt that `pack` has added and that is not scheduled.
    fn unpack(&self, rest: u32) -> PyResult<()> {
        self.core.with(|core| core.unpack(rest))
    }

    /// Return the token budget of a step with a first prompt of `rest` tokens to compute.
    fn budget(&self, rest: u32, num_requests: usize) -> PyResult<u32> {
        self.core.with(|core| core.budget(rest, num_requests))
    }

    /// Decide the kind of the step, and return it with whether due decode steps delay a prefill.
    ///
    /// The kind is `"prefill"`, `"decode"` or `"idle"`.
    fn decide(&self, prefill_wanted: bool, decode_ready: bool, throttled: bool) -> PyResult<(&'static str, bool)> {
        let inputs = PhaseInputs { prefill_wanted, decode_ready, throttle_prefills: throttled };
        self.core.with(|core| {
            let decision = core.decide(inputs);
            (decision.kind.name(), decision.interleaved)
        })
    }

    /// Return whether a head that fits would wait for decode steps that are due under the interleave bound.
    fn interleaves(&self, decode_ready: bool) -> PyResult<bool> {
        self.read(|core| core.interleaves(decode_ready))
    }

    /// Record that the step of the last `decide` ran as a prefill or as a decode.
    fn ran(&self, prefill: bool) -> PyResult<()> {
        self.core.with(|core| core.ran(if prefill { Kind::Prefill } else { Kind::Decode }))
    }

    /// Check a prefill step, and return its padded token counts by id and its token bucket.
    ///
    /// Each row is (id, whether prompt tokens are left, unpadded count). The last row carries the padding. Raise
    /// `RuntimeError` if no compiled graph can run the step.
    #[allow(clippy::needless_pass_by_value, reason = "a list is read into a vector")]
    fn pad_prefill<'py>(
        &self,
        py: Python<'py>,
        rows: Vec<(Bound<'py, PyString>, bool, i64)>,
    ) -> PyResult<(Bound<'py, PyDict>, u32)> {
        let ids: Vec<String> = rows.iter().map(|(id, ..)| id.to_string()).collect();
        let counts: Vec<(bool, i64)> = rows.iter().map(|&(_, prefill, count)| (prefill, count)).collect();
        let found = self.read(|core| core.pad_prefill(&counts, |at| &ids[at]))?;
        let (padded, bucket) = found.map_err(|error| to_py(&error))?;
        let dict = PyDict::new(py);
        for ((id, ..), count) in rows.iter().zip(padded) {
            dict.set_item(id, count)?;
        }
        Ok((dict, bucket))
    }

    /// Check a decode step, and return a copy of its token counts, which need no padding, and its batch bucket.
    ///
    /// `prefilling` lists the ids of prefilling requests; none of them may be in the step. Raise `RuntimeError` if no
    /// compiled graph can run the step.
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
            // The ids are read only for a message, and before the core is locked.
            Err(_) => Err(self.decode_fault(counts, &rows)?),
        }
    }

    /// Return whether at least one of vLLM's running requests would get a token in step `step`.
    fn decode_ready(&self, running: &Bound<'_, PyList>, step: i64) -> PyResult<bool> {
        for request in running.iter() {
            if self.decodes(&request, step)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Return the `Explanation` of request `id` with the reserved and usable blocks of this gate.
    fn explanation(&self, id: Bound<'_, PyString>, reason: Bound<'_, PyString>, needed: u32) -> PyResult<Explanation> {
        let (reserved, usable) = self.read(|core| (core.ledger().reserved(), core.ledger().usable()))?;
        Ok(Explanation { id: id.unbind(), reason: reason.unbind(), needed, reserved, usable })
    }

    /// Number of batch slots in use.
    #[getter]
    fn slots_used(&self) -> PyResult<u32> {
        self.read(|core| core.ledger().slots_used())
    }

    /// Number of KV blocks reserved for requests.
    #[getter]
    fn reserved(&self) -> PyResult<u32> {
        self.read(|core| core.ledger().reserved())
    }

    /// Number of KV blocks in the whole cache.
    #[getter]
    fn usable(&self) -> PyResult<u32> {
        self.read(|core| core.ledger().usable())
    }

    /// Number of KV blocks of a sequence of `max_model_len` tokens.
    #[getter]
    fn longest(&self) -> PyResult<u32> {
        self.read(decide::Gate::longest)
    }
}

impl Gate {
    /// Return the exception for a decode step that the core refuses, with the ids of its rows.
    fn decode_fault(&self, counts: &Bound<'_, PyDict>, rows: &[(bool, i64)]) -> PyResult<PyErr> {
        let ids: Vec<String> = counts.keys().iter().map(|id| id.to_string()).collect();
        let found = self.read(|core| core.pad_decode(rows.iter().copied(), |at| &ids[at]))?;
        let unexpected = || PyRuntimeError::new_err("a decode step was refused without a fault");
        Ok(found.map_or_else(|error| to_py(&error), |_| unexpected()))
    }

    fn read<T>(&self, f: impl FnOnce(&decide::Gate) -> T) -> PyResult<T> {
        self.core.with(|core| f(core))
    }

    /// Return whether a vLLM request would get a token in step `step`, from the attributes of vLLM's `Request`.
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
