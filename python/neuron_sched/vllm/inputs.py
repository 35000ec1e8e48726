"""`VllmInputs`: what vLLM's scheduler sends to a worker, as padded inputs.

A `SchedulerOutput` tells a request once and then only what is new. The native `Worker` keeps the rest; here its fields
are taken apart, and what the native half could not see is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from neuron_sched._native import Batch, NeuronConfig, PaddedInputs, Worker
from neuron_sched.runner import Ids, Shape
from neuron_sched.vllm import compat

__all__ = ["VllmInputs"]


class VllmInputs:
    """The padded inputs of a worker under `NeuronScheduler` or `NeuronAsyncScheduler`.

    Tokens, KV blocks and sampling of each request are kept natively, from the first step that tells it until a step
    that tells its end. `config` is the scheduler's: `neuron_sched.vllm.config.read` makes it from vLLM's. `buffers`
    and `vocab_size` are those of `PaddedInputs`; with steps in flight, as many buffers are needed as there are steps
    whose arrays are still read.

    Each output of the scheduler is filled once, in order, and what each filled step has sampled is accepted, in order:

        batch = inputs.fill(scheduler_output)
        if batch is not None:
            ...
            inputs.accept(sampled_token_ids)

    A refused call is a ValueError that names the request and the value, or a TypeError where a value is no such thing
    at all. It changes nothing: neither what is known, nor any array.
    """

    def __init__(self, config: NeuronConfig, *, buffers: int = 1, vocab_size: int | None = None) -> None:
        self._worker = Worker(PaddedInputs(config, buffers=buffers, vocab_size=vocab_size))

    @property
    def config(self) -> NeuronConfig:
        """The configuration that it was made with."""
        return self._worker.inputs.config

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every compiled shape: prefills, then decodes by rows and context, ascending."""
        return self._worker.inputs.shapes

    @property
    def num_requests(self) -> int:
        """Requests that are known: told, and not told to have ended."""
        return self._worker.num_requests

    @property
    def num_in_flight(self) -> int:
        """Steps that were filled and not accepted."""
        return self._worker.num_in_flight

    def dummy(self, shape: Shape) -> Batch:
        """The arrays of a step without any request, as `PaddedInputs.dummy`; no scheduler tells it, nothing is due."""
        return self._worker.inputs.dummy(shape)

    def fill(
        self,
        scheduler_output: Any,
        tokens: Sequence[int | None] | Ids | Callable[[list[str]], Sequence[int | None] | Ids] | None = None,
        *,
        context_bucket: int | None = None,
    ) -> Batch | None:
        """The arrays of a step; None when nobody is scheduled, and then there is nothing to accept.

        Rows are in the order of `scheduler_output.num_scheduled_tokens`. The shape is the one that the scheduler
        chose, with the smallest context bucket that holds a decode, or `context_bucket`.

        `tokens` are for decode rows whose token is not known, since the step that samples it was not accepted: one
        entry a row, a token id or None; or a callable that is given the ids of those requests and returns their token
        ids in that order, None for one that was accepted in the meantime, by itself or by another thread. They count
        for this step only: `accept` tells them for good.

        ValueError for an output of another scheduler than ours, a request that nobody told, rows of both kinds,
        padded counts that are no compiled shape, drafts, pooling, prompts of embeddings, more than one KV cache
        group, blocks that do not exist or do not hold the row's positions, and a token that is not known. RuntimeError
        while another `fill` runs.
        """
        return self._worker.fill(_step(scheduler_output), tokens, context_bucket)

    def accept(self, sampled: Sequence[Ids]) -> None:
        """Takes what the oldest filled step that was not accepted has sampled.

        One list a real row, in batch order: with one token, or empty for a chunk in the middle of a prompt. Either
        will do for a request that ended, or began anew, since: nothing is kept of it. ValueError when no step is due,
        and for a row with too few tokens or too many; RuntimeError while another `accept` runs.
        """
        self._worker.accept(sampled)


def _step(output: Any) -> tuple[Any, ...]:
    """A `SchedulerOutput` as the native half reads it."""
    try:
        return _fields(output)
    except (AttributeError, TypeError) as error:
        raise TypeError(f"scheduler_output: {error}: expected a SchedulerOutput of vLLM") from error


def _fields(output: Any) -> tuple[Any, ...]:
    """The parts of a `SchedulerOutput`; no loop over those who go on."""
    counts = output.num_scheduled_tokens
    padded, num_seqs_padded = _padding(output) if counts else ({}, 0)
    for name, drafts in output.scheduled_spec_decode_tokens.items():
        raise _refused(name, "scheduled_spec_decode_tokens", drafts, "none: drafts are not supported")
    for name, table in compat.replaced_tables(output).items():
        raise _refused(name, "block_table_updates", table, "none: tables only grow")
    cached = output.scheduled_cached_reqs
    resumed = {name: cached.all_token_ids.get(name) for name in cached.resumed_req_ids}
    return (
        counts,
        padded,
        num_seqs_padded,
        list(output.finished_req_ids),
        [_new_request(new) for new in output.scheduled_new_reqs],
        (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, cached.num_output_tokens, resumed),
    )


def _padding(output: Any) -> tuple[dict[str, int], int]:
    """The padded counts that our schedulers attach."""
    try:
        return output.num_scheduled_tokens_padded, output.num_seqs_padded
    except AttributeError as error:
        raise ValueError(
            f"scheduler_output: {error.name}: missing: expected the output of NeuronScheduler or NeuronAsyncScheduler "
            "(--scheduler-cls neuron_sched.NeuronAsyncScheduler)"
        ) from None


def _new_request(new: Any) -> tuple[Any, ...]:
    """(id, tokens, tokens of the prompt, blocks, computed tokens, sampling) of a request that is told."""
    prompt, params = new.prompt_token_ids, new.sampling_params
    if prompt is None or new.prompt_embeds is not None:
        raise _refused(new.req_id, "prompt_embeds", "given", "a prompt of token ids only")
    if new.pooling_params is not None:
        raise _refused(new.req_id, "pooling_params", new.pooling_params, "none: every prompt ends with a token")
    # Prompt and outputs, for the newer of vLLM's runners: a request that starts over is told as a new one.
    tokens = prompt if new.prefill_token_ids is None else new.prefill_token_ids
    wishes = (params.top_k, params.top_p, params.temperature)
    return new.req_id, tokens, len(prompt), new.block_ids, new.num_computed_tokens, wishes


def _refused(name: str, field: str, value: object, expected: str) -> ValueError:
    return ValueError(f"request '{name}': {field}: {value}: expected {expected}")
