"""`VllmInputs`: padded inputs for a vLLM worker, made from the `SchedulerOutput` of each step.

A `SchedulerOutput` describes a request in full when it is scheduled first, and afterwards only what has changed. The
native `Worker` keeps the rest. This module takes the fields apart and refuses what the native code does not receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuron_sched._native import Batch, NeuronConfig, PaddedInputs, Worker
from neuron_sched.rows import Ids, StepTokens
from neuron_sched.runner import Shape
from neuron_sched.vllm import compat

__all__ = ["VllmInputs"]


class VllmInputs:
    """Padded inputs of a worker under `NeuronScheduler` or `NeuronAsyncScheduler`.

    The tokens, KV blocks and sampling parameters of each request are kept from the first step that schedules it until a
    step that reports it as finished.

    `config` is the scheduler's configuration, which `neuron_sched.vllm.config.read` makes from vLLM's. `buffers` and
    `vocab_size` are those of `PaddedInputs`; with steps in flight, `buffers` must be at least the number of steps whose
    arrays are still read.

    Fill each output of the scheduler once, in order, and accept the tokens sampled by each filled step, in order:

        batch = inputs.fill(scheduler_output)
        if batch is not None:
            ...
            inputs.accept(sampled_token_ids)

    A refused call raises `ValueError` with the request and the value, or `TypeError` if a value has the wrong type. It
    changes neither the kept state nor any array.
    """

    def __init__(self, config: NeuronConfig, *, buffers: int = 1, vocab_size: int | None = None) -> None:
        self._worker = Worker(PaddedInputs(config, buffers=buffers, vocab_size=vocab_size))

    @property
    def config(self) -> NeuronConfig:
        """Configuration passed to the constructor."""
        return self._worker.inputs.config

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All compiled shapes: prefills by tokens, then decodes by rows and context, ascending."""
        return self._worker.inputs.shapes

    @property
    def num_requests(self) -> int:
        """Number of requests that were scheduled and not yet reported as finished."""
        return self._worker.num_requests

    @property
    def num_in_flight(self) -> int:
        """Number of steps that were filled and not accepted."""
        return self._worker.num_in_flight

    def dummy(self, shape: Shape) -> Batch:
        """Return the arrays of a step without requests, as `PaddedInputs.dummy` does. It is never accepted."""
        return self._worker.inputs.dummy(shape)

    def fill(
        self,
        scheduler_output: Any,
        tokens: StepTokens | None = None,
        *,
        context_bucket: int | None = None,
    ) -> Batch | None:
        """Return the arrays of a step, or `None` if no request is scheduled. `None` must not be accepted.

        Rows are in the order of `scheduler_output.num_scheduled_tokens`. The shape is the one that the scheduler has
        chosen, with the smallest context bucket that holds a decode, or `context_bucket`.

        `tokens` supplies the input tokens of decode rows whose last token was sampled by a step that is not accepted
        yet. It is one entry a row, a token id or `None`; or a callable that receives the ids of these requests and
        returns their token ids in the same order, with `None` for a request whose step has been accepted meanwhile, by
        the callable or by another thread. These tokens are used for this step only; `accept` stores the sampled ones.

        Raises `ValueError` for the output of another scheduler, an unknown request, prefill and decode rows in one
        step, padded counts without a compiled shape, draft tokens, pooling, prompt embeddings, more than one KV cache
        group, blocks that do not exist or do not hold the row's positions, and a row without a known input token.
        Raises `RuntimeError` while another `fill` runs.
        """
        return self._worker.fill(_step(scheduler_output), tokens, context_bucket)

    def accept(self, sampled: Sequence[Ids]) -> None:
        """Store the tokens sampled by the oldest filled step that is not accepted.

        `sampled`: one list for each row without padding rows, in batch order: one token, or empty for a chunk that does
        not end its prompt. For a request that has finished or was resumed since, either is valid and nothing is stored.

        Raises `ValueError` if no step is in flight, and for a row with too few or too many tokens. Raises
        `RuntimeError` while another `accept` runs.
        """
        self._worker.accept(sampled)


def _step(output: Any) -> tuple[Any, ...]:
    """Return the fields of a `SchedulerOutput` in the order that `Worker.fill` reads them."""
    try:
        return _fields(output)
    except (AttributeError, TypeError) as error:
        raise TypeError(f"scheduler_output: {error}: expected a SchedulerOutput of vLLM") from error


def _fields(output: Any) -> tuple[Any, ...]:
    # No Python loop over the requests scheduled before: a decode batch may be large.
    counts = output.num_scheduled_tokens
    padded, num_seqs_padded = _padding(output) if counts else ({}, 0)
    for request_id, drafts in output.scheduled_spec_decode_tokens.items():
        raise _error(request_id, "scheduled_spec_decode_tokens", drafts, "none: drafts are not supported")
    for request_id, table in compat.replaced_block_tables(output).items():
        raise _error(request_id, "block_table_updates", table, "none: block tables only grow")
    cached = output.scheduled_cached_reqs
    resumed = {request_id: cached.all_token_ids.get(request_id) for request_id in cached.resumed_req_ids}
    return (
        counts,
        padded,
        num_seqs_padded,
        list(output.finished_req_ids),
        [_new_request(new) for new in output.scheduled_new_reqs],
        (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, cached.num_output_tokens, resumed),
    )


def _padding(output: Any) -> tuple[dict[str, int], int]:
    """Return the padded counts that `NeuronScheduler` attaches to its output."""
    try:
        return output.num_scheduled_tokens_padded, output.num_seqs_padded
    except AttributeError as error:
        raise ValueError(
            f"scheduler_output: {error.name}: missing: expected the output of NeuronScheduler or NeuronAsyncScheduler "
            "(--scheduler-cls neuron_sched.NeuronAsyncScheduler)"
        ) from None


def _new_request(new: Any) -> tuple[Any, ...]:
    """Return (id, tokens, prompt length, block ids, computed tokens, sampling parameters) of a new request."""
    prompt, params = new.prompt_token_ids, new.sampling_params
    if prompt is None or new.prompt_embeds is not None:
        raise _error(new.req_id, "prompt_embeds", "given", "a prompt of token ids only")
    if new.pooling_params is not None:
        raise _error(new.req_id, "pooling_params", new.pooling_params, "none: pooling is not supported")
    # vLLM's newer model runner receives a resumed request as a new one, with its prompt and outputs.
    tokens = prompt if new.prefill_token_ids is None else new.prefill_token_ids
    sampling = (params.top_k, params.top_p, params.temperature)
    return new.req_id, tokens, len(prompt), new.block_ids, new.num_computed_tokens, sampling


def _error(request_id: str, field: str, value: object, expected: str) -> ValueError:
    return ValueError(f"request '{request_id}': {field}: {value}: expected {expected}")
