"""Conversion of vLLM's configuration to a `NeuronConfig`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from neuron_sched._native import NeuronConfig

__all__ = ["FIELDS", "read"]

FIELDS = tuple(field.name for field in NeuronConfig.FIELDS if field.vllm_flag is None)
"""Fields that `additional_config["neuron_config"]` can set. Other keys belong to the platform plug-in."""

# Fields that vLLM's own flags set. A value in `neuron_config` could contradict the flag, so it is refused.
_FLAGS = {field.name: field.vllm_flag for field in NeuronConfig.FIELDS if field.vllm_flag is not None}

_PLUGIN = "vllm_neuron.utils.bucket_utils"


def read(vllm_config: Any, num_blocks: int, *, runs_ahead: bool) -> NeuronConfig:
    """Return the configuration of a scheduler with `num_blocks` KV blocks, vLLM's null block included.

    `runs_ahead`: whether a step may be scheduled while another is in flight.

    Raises `ValueError` if a value is invalid, with one line for each: the field, its value and what is expected.
    """
    given = _given(vllm_config)
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    tokens, longest = scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len
    if not scheduler.enable_chunked_prefill and tokens < longest:
        raise ValueError(
            f"max_num_batched_tokens: {tokens}: expected at least max_model_len = {longest} when chunked prefill is "
            "off, because a longer prompt would never be scheduled (--enable-chunked-prefill or "
            "--max-num-batched-tokens)"
        )
    drafts = getattr(vllm_config, "num_speculative_tokens", 0)
    given.update(_plugin_buckets(vllm_config, given))
    return NeuronConfig(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        block_size=cache.block_size,
        # vLLM never allocates its null block to a request.
        num_blocks=num_blocks - 1,
        long_prefill_token_threshold=max(0, scheduler.long_prefill_token_threshold),
        prefix_caching=bool(cache.enable_prefix_caching),
        policy=scheduler.policy,
        # Drafts occupy KV slots; with a step in flight, those of both steps do.
        lookahead=_lookahead(vllm_config) + drafts * (2 if runs_ahead else 1),
        dcp=vllm_config.parallel_config.decode_context_parallel_size,
        **given,
    )


def _given(vllm_config: Any) -> dict[str, Any]:
    """Return the fields that `additional_config["neuron_config"]` sets."""
    additional = vllm_config.additional_config
    given = additional.get("neuron_config") if isinstance(additional, Mapping) else None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"neuron_config: {given!r}: expected a mapping of field names to values")
    set_by_flags = [name for name in _FLAGS if name in given]
    if set_by_flags:
        faults = (f"{name}: {given[name]!r}: expected to be set by vLLM's {_FLAGS[name]} only" for name in set_by_flags)
        raise ValueError("\n".join(faults))
    fields = {name: given[name] for name in FIELDS if name in given}
    costs = fields.get("prefill_cost")
    if isinstance(costs, Mapping):
        # On the command line the configuration is JSON, in which keys are strings.
        fields["prefill_cost"] = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in costs.items()}
    return fields


def _lookahead(vllm_config: Any) -> int:
    """Return the number of tokens for which vLLM allocates KV slots beyond the scheduled ones."""
    if hasattr(vllm_config, "num_lookahead_tokens"):
        return int(vllm_config.num_lookahead_tokens)
    speculative = vllm_config.speculative_config
    return int(speculative.num_speculative_tokens) if speculative is not None and speculative.use_eagle() else 0


def _plugin_buckets(vllm_config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the bucket lists that the production plug-in resolves, or nothing if the plug-in is not installed.

    Its runner compiles graphs for these buckets, so the scheduler must pad to the same ones.
    """
    try:
        plugin = importlib.import_module(_PLUGIN)
    except ImportError:
        return {}
    scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    budget = min(scheduler.max_num_batched_tokens, longest)
    segments, auto = given.get("kv_segment_size_buckets"), None
    if segments is None:
        segments, auto = plugin.resolve_segmented_prefill_config(budget, longest)
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    tokens = plugin.resolve_num_batched_tokens_buckets(
        budget,
        configured_buckets=given.get("num_batched_tokens_buckets"),
        use_configured_buckets="num_batched_tokens_buckets" in given,
        # If only the segment sizes are configured, its runner uses them as token buckets.
        auto_buckets=auto if auto is not None else segments,
        dcp_stride=dcp * vllm_config.cache_config.block_size if dcp > 1 else 1,
    )
    if "num_seqs_buckets" in given:
        seqs = plugin.validate_num_seqs_buckets(given["num_seqs_buckets"], scheduler.max_num_seqs)
    else:
        seqs = plugin.get_default_num_seqs_buckets(scheduler.max_num_seqs)
    return {"num_batched_tokens_buckets": tokens, "num_seqs_buckets": seqs}
