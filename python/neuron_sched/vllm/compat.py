"""Differences between vLLM releases. Only this module and `requirements` know a release of vLLM's scheduler."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from neuron_sched.vllm import requirements

# 0.24 and 0.25 admit while `len(running)` differs from the limit; later releases add the sessions that wait for input.
# A version that cannot be parsed is treated as the newest tested release.
_LIMIT_COUNTS_SESSIONS = (
    requirements.parse_release(requirements.installed_release()) or requirements.SUPPORTED[1]
) >= (0, 26)


# Waiting queues ---------------------------------------------------------------------------------------------------


def waiting_queues(scheduler: Any) -> tuple[str, str]:
    """Return the attribute names of the base class's primary and secondary waiting queue.

    The secondary queue is `skipped_waiting` up to 0.30, for blocked requests, and `kv_holding_waiting` later, for
    requests with allocated KV blocks.
    """
    return ("waiting", "kv_holding_waiting" if hasattr(scheduler, "kv_holding_waiting") else "skipped_waiting")


def candidate_queues(scheduler: Any, primary: RequestQueue, secondary: RequestQueue) -> tuple[RequestQueue, ...]:
    """Return those of the two waiting queues that admit requests in the current pause state."""
    if scheduler._pause_state == PauseState.UNPAUSED:
        return (primary, secondary)
    drains = scheduler._pause_state == PauseState.PAUSED_NEW and hasattr(scheduler, "kv_holding_waiting")
    return (secondary,) if drains else ()


def admitting_queue(scheduler: Any) -> str:
    """Return the attribute name of a queue from which the base class admits in the current pause state."""
    return "waiting" if scheduler._pause_state == PauseState.UNPAUSED else "kv_holding_waiting"


def belongs_in_secondary_queue(scheduler: Any, request: Request) -> bool:
    """Return whether the base class keeps a waiting request in its secondary queue."""
    if hasattr(scheduler, "kv_holding_waiting"):
        return bool(scheduler._holds_kv_blocks(request))
    return is_blocked(scheduler, request)


def is_blocked(scheduler: Any, request: Request) -> bool:
    """Return whether a request has a status that waits for an event outside the scheduler."""
    return bool(scheduler._is_blocked_waiting_status(request.status))


def promote_if_ready(scheduler: Any, request: Request) -> bool:
    """Ask the base class whether a blocked request is ready; it then sets the request's status to waiting."""
    if not hasattr(scheduler, "_handle_blocked_waiting_request"):
        return bool(scheduler._try_promote_blocked_waiting_request(request))
    ready = bool(scheduler._handle_blocked_waiting_request(request))
    if ready:
        scheduler.deferred_waiting.discard(request)
    return ready


def has_stale_output_in_flight(request: Request) -> bool:
    """Return whether output scheduled before the request's preemption is in flight and will be delivered.

    The base class does not admit such a request (0.28 and later).
    """
    return bool(getattr(request, "num_stale_output_tokens", 0)) and not request.drop_stale_output


def any_unblocked_waiting(scheduler: Any) -> bool:
    """Return whether a waiting request is not known to be blocked. O(1): compares lengths and walks no queue."""
    if hasattr(scheduler, "deferred_waiting"):
        return len(scheduler.waiting) + len(scheduler.kv_holding_waiting) > len(scheduler.deferred_waiting)
    return bool(scheduler.waiting)


def is_loading_remote_kv(request: Request) -> bool:
    """Return whether a KV connector is loading the request's KV blocks."""
    return bool(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)


# Limits -----------------------------------------------------------------------------------------------------------


def active_limit(scheduler: Any) -> str:
    """Return the attribute name of the limit at which the base class stops admitting."""
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def closed_limit(scheduler: Any, running: int) -> int:
    """Return the value of that limit at which no request is admitted beside `running` visible ones."""
    return running + (scheduler.num_waiting_for_streaming_input if _LIMIT_COUNTS_SESSIONS else 0)


def caps_single_prompt(scheduler: Any) -> bool:
    """Return whether the base class applies `long_prefill_token_threshold` to the only request too (up to 0.30)."""
    always_caps = not hasattr(scheduler, "adaptive_long_prefill_threshold")
    return always_caps and bool(scheduler.scheduler_config.long_prefill_token_threshold)


class _ConstantLookup:
    """Replaces vLLM's table of draft counts by batch size: every size has the same count."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __getitem__(self, rows: int) -> int:
        return self._value


def overrides_against_draft_padding(scheduler: Any) -> list[tuple[Any, str, Any]]:
    """Return attribute overrides, as (owner, name, value), under which a prefill has no draft tokens.

    From 0.26 on the base class pads a new request with one token to compute to the width of a decode, unless
    `dynamic_sd_lookup` is set.
    """
    if not scheduler.num_spec_tokens or scheduler.dynamic_sd_lookup is not None:
        return []
    return [(scheduler, "dynamic_sd_lookup", _ConstantLookup(scheduler.num_spec_tokens))]


def throttles_prefills(scheduler: Any, requested: bool) -> bool:
    """Return whether prefills are throttled in this step: `requested` by the caller, or by the interval of 0.33."""
    if scheduler.prefill_capacity_bound:
        return False
    interval = getattr(scheduler, "local_prefill_interval", 1)
    return requested or (interval > 1 and scheduler.num_executed_steps + 1 - scheduler.last_prefill_step < interval)


# KV cache ---------------------------------------------------------------------------------------------------------


def kv_groups(scheduler: Any) -> list[tuple[int, int, int | None]]:
    """Return (block size in tokens, extra blocks, maximum of blocks per request or `None`) of each KV cache group."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [_kv_group(manager) for manager in managers] or [(scheduler.cache_config.block_size, 0, None)]


def _kv_group(manager: Any) -> tuple[int, int, int | None]:
    spec = manager.kv_cache_spec
    extra = getattr(spec, "num_speculative_blocks", 0)
    if type(spec).__name__ == "MambaSpec":
        mode = getattr(spec, "mamba_cache_mode", "none")
        if mode != "all":
            # One recurrent state and, in mode "align", the state that is being copied.
            states = (2 if mode == "align" else 1) + extra + getattr(spec, "num_prefill_checkpoint_blocks", 0)
            return (1, states, states)
    private = getattr(manager, "_max_admission_blocks_per_request", None)
    return (manager.block_size, extra, getattr(manager, "max_admission_blocks_per_request", private))


class PrefixLookupStats:
    """Removes the prefix-cache lookup of a head from vLLM's statistics if the base class does not admit the head.

    Up to 0.26 the base class counts every lookup, so a head that is tried in several steps would be counted in each.
    Later releases count on admission, and nothing is removed.
    """

    def __init__(self, scheduler: Any) -> None:
        self._manager = scheduler.kv_cache_manager
        self._counts_lookups = not hasattr(self._manager, "record_prefix_cache_stats")
        self._head: Request | None = None
        self._saved: dict[str, Any] = {}

    def before_lookup(self, head: Request) -> None:
        """Save the statistics before the base class looks up `head`, and finish the lookup of the head before it."""
        if self._counts_lookups and head is not self._head and self._manager.prefix_cache_stats is not None:
            self.finish_lookup()
            self._head, self._saved = head, copy.copy(vars(self._manager.prefix_cache_stats))

    def finish_lookup(self) -> None:
        """Restore the saved statistics if the last head was not admitted."""
        if (
            self._head is not None
            and self._head.status != RequestStatus.RUNNING
            and not is_loading_remote_kv(self._head)
        ):
            vars(self._manager.prefix_cache_stats).update(self._saved)
        self._head = None


# Output -----------------------------------------------------------------------------------------------------------

ONE_TIME_FIELDS = (
    "free_encoder_mm_hashes",
    "kv_cache_block_copies",
    "new_block_ids_to_zero",
    "partial_tail_offloads",
    "preempted_req_ids",
)
"""Fields of a `SchedulerOutput` whose content the base class reports once: lists, dicts, sets, or `None`."""


def restore_reported_ids(scheduler: Any, output: Any) -> None:
    """Let the next call of the base class report the finished and preempted request ids of `output` again."""
    scheduler.finished_req_ids |= output.finished_req_ids
    if hasattr(scheduler, "reset_preempted_req_ids") and output.preempted_req_ids:
        scheduler.reset_preempted_req_ids |= output.preempted_req_ids


def merge_one_time_fields(first: Any, second: Any) -> None:
    """Add the one-time fields of `first`, an output that no worker received, to the later output `second`."""
    for name in ONE_TIME_FIELDS:
        earlier, later = getattr(first, name, None), getattr(second, name, None)
        if earlier and later:
            setattr(second, name, earlier + later if isinstance(earlier, list) else earlier | later)
        elif earlier:
            setattr(second, name, earlier)


def merge_block_states(first: Any, second: Any) -> Any:
    """Return the connector's block state for both outputs of a step (0.30 and later)."""
    if first is None or second is None:
        return first if second is None else second
    second.req_ids |= first.req_ids
    for request_id, offloads in first.boundary_state_offloads.items():
        second.boundary_state_offloads[request_id] = offloads + second.boundary_state_offloads.get(request_id, [])
    return second


def replaced_block_tables(output: Any) -> dict[str, Any]:
    """Return the block tables that replace those of running requests, by request id (0.30, from a connector)."""
    return getattr(output, "block_table_updates", None) or {}


class _NoEmptyMetadata:
    """A connector that builds no metadata for an output without scheduled tokens."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def build_connector_meta(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            return None
        return self._connector.build_connector_meta(output, *args, **kwargs)


def overrides_against_empty_metadata(scheduler: Any) -> list[tuple[Any, str, Any]]:
    """Return attribute overrides, as (owner, name, value), under which connectors build no metadata for an empty call.

    They cover the connectors that the base class calls directly. The call that follows in the same step builds the
    metadata.
    """
    names = ("ec_connector", "aux_output_connector")
    found = [(name, getattr(scheduler, name, None)) for name in names]
    return [(scheduler, name, _NoEmptyMetadata(connector)) for name, connector in found if connector is not None]


def repeat_step(scheduler: Any, scheduled_before: set[str]) -> None:
    """Prepare the base class for a second call in the same step.

    `scheduled_before`: ids of the requests scheduled in the previous step, which the first call has overwritten.
    """
    scheduler.current_step -= 1
    scheduler.prev_step_scheduled_req_ids.clear()
    scheduler.prev_step_scheduled_req_ids.update(scheduled_before)
