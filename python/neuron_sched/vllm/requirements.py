"""What the vLLM classes require of vLLM: the tested releases, and the members of the base class that they use."""

from __future__ import annotations

import re

import vllm

from neuron_sched.vllm.log import logger

__all__ = [
    "ATTRIBUTES",
    "METHODS",
    "SUPPORTED",
    "SUPPORTED_TEXT",
    "installed_release",
    "missing",
    "parse_release",
    "require",
    "warn_if_untested",
]

SUPPORTED = ((0, 24), (0, 33))
"""First and last tested release, as (major, minor)."""
SUPPORTED_TEXT = "0.24 to 0.33"

METHODS: tuple[str | tuple[str, ...], ...] = (
    "_build_kv_connector_meta",
    "_enqueue_waiting_request",
    "_free_blocks",
    "_free_request",
    ("_handle_blocked_waiting_request", "_try_promote_blocked_waiting_request"),
    "_handle_stopped_request",
    "_is_blocked_waiting_status",
    "_preempt_request",
    "_update_after_schedule",
    "_update_request_as_session",
    "_update_requests_with_invalid_blocks",
    "add_request",
    "finish_requests",
    "get_grammar_bitmask",
    "get_num_unfinished_requests",
    "get_request_counts",
    "has_unfinished_requests",
    "schedule",
    "update_draft_token_ids",
    "update_from_output",
)
"""Methods of the base class that are called or overridden. A tuple lists the names that one method has had."""
ATTRIBUTES: tuple[str | tuple[str, ...], ...] = (
    "_pause_state",
    "cache_config",
    "connector",
    "current_step",
    "dynamic_sd_lookup",
    "ec_connector",
    "finished_req_ids",
    "kv_cache_manager",
    ("kv_holding_waiting", "skipped_waiting"),
    "lora_config",
    "max_model_len",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "num_lookahead_tokens",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "policy",
    "prefill_capacity_bound",
    "prev_step_scheduled_req_ids",
    "requests",
    "running",
    "scheduler_config",
    "structured_output_manager",
    "waiting",
)
"""Attributes of a scheduler of the base class that are read or replaced. A tuple lists alternatives."""


def installed_release() -> str:
    """Return the version string of the installed vLLM."""
    return str(getattr(vllm, "__version__", "unknown"))


def parse_release(version: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version string, or `None` if it starts with neither."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def warn_if_untested() -> None:
    """Log a warning if the installed release is outside the tested range."""
    release = parse_release(installed_release())
    if release is None or not SUPPORTED[0] <= release <= SUPPORTED[1]:
        logger.warning(
            "neuron-sched is tested with vLLM %s, and the installed vLLM is %s. It may not work.",
            SUPPORTED_TEXT,
            installed_release(),
        )


def missing(owner: object, names: tuple[str | tuple[str, ...], ...]) -> list[str]:
    """Return the entries of `names` that `owner` lacks. A tuple is present if one of its names is."""
    groups = [(name,) if isinstance(name, str) else name for name in names]
    return [" or ".join(group) for group in groups if not any(hasattr(owner, name) for name in group)]


def require(owner: object, names: tuple[str | tuple[str, ...], ...]) -> None:
    """Raise `RuntimeError` if `owner`, the base class or an instance of it, lacks an entry of `names`."""
    lacking = missing(owner, names)
    if lacking:
        raise RuntimeError(
            f"neuron-sched cannot run on vLLM {installed_release()}: its scheduler lacks {', '.join(lacking)}. "
            f"Supported releases: {SUPPORTED_TEXT}."
        )
