"""What differs between vLLM releases; the only file that knows."""

from __future__ import annotations

import copy
import re
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

# vLLM gives handlers to loggers below its own name only.
logger = init_logger("vllm.neuron_sched")

SUPPORTED = ((0, 24), (0, 33))
SUPPORTED_TEXT = "0.24 to 0.33"

# What our classes use of the base, by release where it differs: alternatives are tuples. The drift test reads this.
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


def release() -> str:
    """The version of the vLLM that runs, as it tells it."""
    return str(getattr(vllm, "__version__", "unknown"))


def _parsed(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


# 0.24 and 0.25 admit while `len(running)` differs from the limit; later ones count waiting sessions too. A version
# that cannot be read counts as new.
_LIMIT_COUNTS_SESSIONS = (_parsed(release()) or SUPPORTED[1]) >= (0, 26)


def warn_of_release() -> None:
    """One warning where the release is outside the range that was tested."""
    found = _parsed(release())
    if found is None or not SUPPORTED[0] <= found <= SUPPORTED[1]:
        logger.warning(
            "neuron-sched was tested with vLLM %s; this is vLLM %s. It may or may not work.", SUPPORTED_TEXT, release()
        )


def missing(owner: object, names: tuple[str | tuple[str, ...], ...]) -> list[str]:
    """Those of `names` that `owner` lacks; of alternatives, one is enough."""
    groups = [(name,) if isinstance(name, str) else name for name in names]
    return [" or ".join(group) for group in groups if not any(hasattr(owner, name) for name in group)]


def require(owner: object, names: tuple[str | tuple[str, ...], ...]) -> None:
    """RuntimeError, in a sentence, where the base lacks what we use."""
    lacks = missing(owner, names)
    if lacks:
        raise RuntimeError(
            f"neuron-sched cannot run on vLLM {release()}: its scheduler lacks {', '.join(lacks)}. "
            f"Supported is vLLM {SUPPORTED_TEXT}."
        )


# Waiting queues ---------------------------------------------------------------------------------------------------


def waiting_queues(scheduler: Any) -> tuple[str, str]:
    """Names of the base's waiting queues: that of plain waiters, and that of those set apart."""
    # Up to 0.30 the second is for whoever is blocked; later for whoever holds KV blocks.
    return ("waiting", "kv_holding_waiting" if hasattr(scheduler, "kv_holding_waiting") else "skipped_waiting")


def candidate_queues(scheduler: Any, plain: RequestQueue, apart: RequestQueue) -> tuple[RequestQueue, ...]:
    """Those of the two queues that requests may be admitted from in the present pause state."""
    if scheduler._pause_state == PauseState.UNPAUSED:
        return (plain, apart)
    drains = scheduler._pause_state == PauseState.PAUSED_NEW and hasattr(scheduler, "kv_holding_waiting")
    return (apart,) if drains else ()


def exposing_queue(scheduler: Any) -> str:
    """Name of the queue from which the base admits in the present pause state."""
    return "waiting" if scheduler._pause_state == PauseState.UNPAUSED else "kv_holding_waiting"


def waits_apart(scheduler: Any, request: Request) -> bool:
    """Whether a waiting request belongs into the queue of those set apart."""
    if hasattr(scheduler, "kv_holding_waiting"):
        return bool(scheduler._holds_kv_blocks(request))
    return is_blocked(scheduler, request)


def is_blocked(scheduler: Any, request: Request) -> bool:
    """Whether it waits for something outside the scheduler, as far as was found out."""
    return bool(scheduler._is_blocked_waiting_status(request.status))


def promote(scheduler: Any, request: Request) -> bool:
    """Asks the base whether a blocked request is ready by now; if so it is a plain waiter from then on."""
    if not hasattr(scheduler, "_handle_blocked_waiting_request"):
        return bool(scheduler._try_promote_blocked_waiting_request(request))
    ready = bool(scheduler._handle_blocked_waiting_request(request))
    if ready:
        scheduler.deferred_waiting.discard(request)
    return ready


def stale_in_flight(request: Request) -> bool:
    """Whether output of a time before its preemption is still to come; the base does not start it before (0.28 on)."""
    return bool(getattr(request, "num_stale_output_tokens", 0)) and not request.drop_stale_output


def waits_unblocked(scheduler: Any) -> bool:
    """Whether anybody waits who is not known to be blocked; tells by lengths, and never walks a queue."""
    if hasattr(scheduler, "deferred_waiting"):
        return len(scheduler.waiting) + len(scheduler.kv_holding_waiting) > len(scheduler.deferred_waiting)
    return bool(scheduler.waiting)


def loads_remote_kv(request: Request) -> bool:
    """Whether its KV blocks are being filled from elsewhere."""
    return bool(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)


# Limits -----------------------------------------------------------------------------------------------------------


def active_limit(scheduler: Any) -> str:
    """Name of the limit that ends the base's admissions."""
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def closed_limit(scheduler: Any, running: int) -> int:
    """The value of that limit with which nobody is admitted beside `running` requests."""
    return running + (scheduler.num_waiting_for_streaming_input if _LIMIT_COUNTS_SESSIONS else 0)


def caps_alone(scheduler: Any) -> bool:
    """Whether the base caps a long prompt even when nobody else is there (up to 0.30)."""
    alone = not hasattr(scheduler, "adaptive_long_prefill_threshold")
    return alone and bool(scheduler.scheduler_config.long_prefill_token_threshold)


class _Constant:
    """Stands in for vLLM's table of draft counts by batch size: the same for all."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __getitem__(self, rows: int) -> int:
        return self._value


def without_padding_drafts(scheduler: Any) -> list[tuple[Any, str, Any]]:
    """What keeps the base from widening a prompt's last token to the width of a decode (from 0.26 on)."""
    if not scheduler.num_spec_tokens or scheduler.dynamic_sd_lookup is not None:
        return []
    return [(scheduler, "dynamic_sd_lookup", _Constant(scheduler.num_spec_tokens))]


def throttled(scheduler: Any, throttle_prefills: bool) -> bool:
    """Whether the caller, or a cadence of the engine's own (0.33), holds prefills back in this step."""
    if scheduler.prefill_capacity_bound:
        return False
    interval = getattr(scheduler, "local_prefill_interval", 1)
    return throttle_prefills or (
        interval > 1 and scheduler.num_executed_steps + 1 - scheduler.last_prefill_step < interval
    )


# KV cache ---------------------------------------------------------------------------------------------------------


def kv_groups(scheduler: Any) -> list[tuple[int, int, int | None]]:
    """(tokens of a block, blocks beyond those for tokens, most blocks) of each KV cache group."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [_kv_group(manager) for manager in managers] or [(scheduler.cache_config.block_size, 0, None)]


def _kv_group(manager: Any) -> tuple[int, int, int | None]:
    spec = manager.kv_cache_spec
    extra = getattr(spec, "num_speculative_blocks", 0)
    if type(spec).__name__ == "MambaSpec":
        mode = getattr(spec, "mamba_cache_mode", "none")
        if mode != "all":
            # A recurrent state and, in mode "align", the one that is being copied.
            states = (2 if mode == "align" else 1) + extra + getattr(spec, "num_prefill_checkpoint_blocks", 0)
            return (1, states, states)
    private = getattr(manager, "_max_admission_blocks_per_request", None)
    return (manager.block_size, extra, getattr(manager, "max_admission_blocks_per_request", private))


class PrefixStats:
    """Takes back what a look-up in the prefix cache has counted of a head that was not started then.

    Up to 0.26; later releases count on admission.
    """

    def __init__(self, scheduler: Any) -> None:
        self._manager = scheduler.kv_cache_manager
        self._counts_lookups = not hasattr(self._manager, "record_prefix_cache_stats")
        self._head: Request | None = None
        self._saved: dict[str, Any] = {}

    def look_up(self, head: Request) -> None:
        """Before the base looks at `head`; whom it looked at before is decided by now."""
        if self._counts_lookups and head is not self._head and self._manager.prefix_cache_stats is not None:
            self.settle()
            self._head, self._saved = head, copy.copy(vars(self._manager.prefix_cache_stats))

    def settle(self) -> None:
        """Takes the last look-up back if it came to nothing."""
        if self._head is not None and self._head.status != RequestStatus.RUNNING and not loads_remote_kv(self._head):
            vars(self._manager.prefix_cache_stats).update(self._saved)
        self._head = None


# Output -----------------------------------------------------------------------------------------------------------

# Things that the base hands out once: of two passes in one call, both must be told. Lists, dicts, sets, or None.
HANDED_OUT_ONCE = (
    "free_encoder_mm_hashes",
    "kv_cache_block_copies",
    "new_block_ids_to_zero",
    "partial_tail_offloads",
    "preempted_req_ids",
)


def give_back_ids(scheduler: Any, output: Any) -> None:
    """Lets the next pass tell of those that ended or were preempted, as the first has done."""
    scheduler.finished_req_ids |= output.finished_req_ids
    if hasattr(scheduler, "reset_preempted_req_ids") and output.preempted_req_ids:
        scheduler.reset_preempted_req_ids |= output.preempted_req_ids


def tell_again(first: Any, second: Any) -> None:
    """Adds to an output what an earlier pass of the same step has handed out."""
    for name in HANDED_OUT_ONCE:
        told, own = getattr(first, name, None), getattr(second, name, None)
        if told and own:
            setattr(second, name, told + own if isinstance(told, list) else told | own)
        elif told:
            setattr(second, name, told)


def join_block_state(first: Any, second: Any) -> Any:
    """The connector's view of blocks for both passes (0.30 on)."""
    if first is None or second is None:
        return first if second is None else second
    second.req_ids |= first.req_ids
    for request_id, offloads in first.boundary_state_offloads.items():
        second.boundary_state_offloads[request_id] = offloads + second.boundary_state_offloads.get(request_id, [])
    return second


def replaced_tables(output: Any) -> dict[str, Any]:
    """Block tables that a worker is told whole although their requests go on (0.30; a connector's doing)."""
    return getattr(output, "block_table_updates", None) or {}


class _Deferred:
    """A connector whose metadata is not built in this pass: the pass that follows in the same call does it."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def build_connector_meta(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            return None
        return self._connector.build_connector_meta(output, *args, **kwargs)


def deferring(scheduler: Any) -> list[tuple[str, Any]]:
    """The connectors that the base calls directly, each replaced by one that builds nothing for an empty pass."""
    names = ("ec_connector", "aux_output_connector")
    found = [(name, getattr(scheduler, name, None)) for name in names]
    return [(name, _Deferred(connector)) for name, connector in found if connector is not None]


def same_step(scheduler: Any, before: set[str]) -> None:
    """Lets a second pass run in the step of the first, with what was scheduled before the first."""
    scheduler.current_step -= 1
    scheduler.prev_step_scheduled_req_ids.clear()
    scheduler.prev_step_scheduled_req_ids.update(before)
