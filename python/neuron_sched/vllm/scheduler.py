"""`NeuronScheduler` and `NeuronAsyncScheduler`: vLLM schedulers for hardware that runs compiled shapes only.

The base class keeps queues, KV blocks, connectors and statistics. These classes restrict what it sees in each call to
one phase, and restore it afterwards. The decisions are made by the core, through `neuron_sched._native.Gate`.
"""

from __future__ import annotations

import enum
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from neuron_sched.vllm import requirements
from neuron_sched.vllm.buckets import get_bucket_for_count, get_default_num_batched_tokens_buckets
from neuron_sched.vllm.log import logger
from neuron_sched.vllm.planning import PlanningScheduler
from neuron_sched.vllm.record import record_of
from neuron_sched.vllm.watchdog import Watchdog

__all__ = [
    "NeuronAsyncScheduler",
    "NeuronScheduler",
    "SchedulerState",
    "get_bucket_for_count",
    "get_default_num_batched_tokens_buckets",
]


class SchedulerState(enum.Enum):
    """`IDLE` if no request is waiting or running, otherwise the phase of the last step that scheduled a token."""

    IDLE = enum.auto()
    ACTIVE_PREFILL = enum.auto()
    ACTIVE_DECODE = enum.auto()

    def __str__(self) -> str:
        return self.name


class NeuronScheduler(PlanningScheduler):
    """vLLM's scheduler with steps that are all prefill or all decode, padded to compiled sizes.

    Takes the arguments of vLLM's `Scheduler`; further settings come from `additional_config["neuron_config"]`. Raises
    `ValueError` if the configuration is invalid, with each field, its value and what is expected.

    The output of `schedule()` has two more attributes. `num_scheduled_tokens_padded` maps request ids to padded token
    counts: in a prefill they add up to the token bucket, in a decode they are the unpadded counts. `num_seqs_padded` is
    the batch bucket of a decode in rows, and 0 otherwise.
    """

    prefill_capacity_bound: bool

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.max_num_seqs: int = self.neuron_config.max_num_seqs
        self.max_prefills_per_batch: int = self.neuron_config.max_prefills_per_batch
        self.num_batched_tokens_buckets: list[int] = self.neuron_config.num_batched_tokens_buckets
        self.num_seqs_buckets: list[int] = self.neuron_config.num_seqs_buckets
        self.total_scheduled_tokens = 0
        """Unpadded tokens of all prefill steps so far."""
        self.total_padding_tokens = 0
        """Padding tokens of all prefill steps so far."""
        self._state = SchedulerState.IDLE
        self._watchdog = Watchdog()
        logger.info(
            "Initialized %s on vLLM %s: prefill buckets %s tokens, decode buckets %s rows, KV cache of %d usable "
            "blocks (%d requests of max_model_len %d at once, kv_admission '%s').",
            type(self).__name__,
            requirements.installed_release(),
            self.num_batched_tokens_buckets,
            self.num_seqs_buckets,
            self._gate.usable,
            self._gate.usable // self._gate.longest,
            self.max_model_len,
            self.neuron_config.kv_admission,
        )

        if self._gate.longest > self._gate.usable:
            tokens = self._gate.usable * self.neuron_config.block_size
            logger.warning(
                "max_model_len: %d: expected at most the %d tokens of the KV cache. Each request whose worst case is "
                "larger finishes with an error.",
                self.max_model_len,
                tokens,
            )

    @property
    def state(self) -> SchedulerState:
        """Phase of the last step that scheduled a token, or `IDLE` if no request is waiting or running."""
        return self._state

    @property
    def empty_steps(self) -> int:
        """Number of steps so far with unfinished requests but no scheduled token."""
        return self._watchdog.empty_steps

    def schedule(self, throttle_prefills: bool = False, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan one step: a prefill, a decode, or an empty step."""
        self._begin_step()
        capacity_bound = self.prefill_capacity_bound
        try:
            output, prefill, throttled = self._plan(throttle_prefills, *args, **kwargs)
        except BaseException:
            # Heads that were selected before the failure are reinserted into their queues.
            self._settle_selection()
            raise
        # vLLM does not throttle a rank whose last prefill step could not admit all ready requests.
        paused = self._pause_state == PauseState.PAUSED_ALL
        self.prefill_capacity_bound = capacity_bound if throttled or paused else self._ready_request_remains()
        self._finish_step(output, prefill)
        return output

    def _finish_step(self, output: SchedulerOutput, prefill: bool) -> None:
        """Check, pad and count a planned step."""
        self._merge_unreturned(output)
        counts = self._last_scheduled_ids = output.num_scheduled_tokens
        output.num_scheduled_tokens_padded, output.num_seqs_padded = {}, 0
        if counts:
            prefill = self._pad(output, prefill)
            self._gate.ran(prefill)
            self._state = SchedulerState.ACTIVE_PREFILL if prefill else SchedulerState.ACTIVE_DECODE
        self._num_steps_in_flight += 1
        self._idle_if_empty()
        self._attach_grammar(output)
        self._watchdog.record_step(bool(counts), self.has_unfinished_requests(), self.explain)

    def _pad(self, output: SchedulerOutput, prefill: bool) -> bool:
        """Check a step and attach its padded counts. Return whether it is a prefill step."""
        counts = output.num_scheduled_tokens
        rows = self._prefill_rows(output) if prefill else []
        if not any(is_prefill for _, is_prefill, _ in rows):
            # Prompts of which another node has computed all but the last token make a decode step.
            prefilling = [request.request_id for request in self._prefilling]
            output.num_scheduled_tokens_padded, output.num_seqs_padded = self._gate.pad_decode(counts, prefilling)
            return False
        output.num_scheduled_tokens_padded, bucket = self._gate.pad_prefill(rows)
        total = output.total_num_scheduled_tokens
        self.total_scheduled_tokens += total
        self.total_padding_tokens += bucket - total
        return True

    def _prefill_rows(self, output: SchedulerOutput) -> list[tuple[str, bool, int]]:
        """Return (id, whether prompt tokens were left before the step, count) of each row."""
        cached = output.scheduled_cached_reqs
        computed_before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed_before.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        admitted = {new.req_id for new in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        rows = []
        for request_id, count in output.num_scheduled_tokens.items():
            request, computed = self.requests.get(request_id), computed_before.get(request_id, -1)
            prompt_left = request is not None and computed >= 0 and self._has_prompt_left(request, computed)
            if prompt_left and request_id in admitted and self._has_remote_prefill(request):
                # With only its last token left it counts as a decode row.
                prompt_left = computed != request.num_tokens - 1
            rows.append((request_id, prompt_left, count))
        return rows

    def _calculate_padded_count(self, token_count: int) -> int:
        """Return the smallest token bucket that holds a count, or 0 for 0.

        Raises `ValueError` if the count is above the last bucket.
        """
        return get_bucket_for_count(token_count, self.num_batched_tokens_buckets)

    def _attach_grammar(self, output: SchedulerOutput) -> None:
        """Attach the grammar bitmask to the output, for a worker that samples within its step.

        It is `None` if the bitmask depends on tokens of a step in flight. Only vLLM's later call can compute it then.
        """
        output._grammar_bitmask = output._structured_output_request_ids = None
        compiled = self.structured_output_manager.backend is not None
        if compiled and output.has_structured_output_requests and not output.pending_structured_output_tokens:
            grammar = self.get_grammar_bitmask(output)
            if grammar is not None:
                # The manager overwrites the same array in vLLM's own call.
                output._grammar_bitmask = grammar.grammar_bitmask.copy()
                output._structured_output_request_ids = list(grammar.structured_output_request_ids)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """Process the output of a step, as vLLM does. Requests that can never run finish here with an error."""
        self._num_steps_in_flight = max(0, self._num_steps_in_flight - 1)
        if not self._num_steps_in_flight:
            self._last_refusal = None
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self._idle_if_empty()
        return outputs

    def _idle_if_empty(self) -> None:
        if not self.running and not any(self._waiting_queues()):
            self._state = SchedulerState.IDLE

    def check(self) -> None:
        """Check the gate and the tracked requests against the queues of the base class.

        Raises `RuntimeError` with each violated invariant, which is always a bug in these classes. For tests and
        debugging only: it walks all queues.
        """
        waiting = [request for queue in self._waiting_queues() for request in queue]
        never_queued = [request for request in self._unservable.values() if record_of(request) is None]
        unfinished = [*self.running, *waiting, *never_queued]
        reserved = [request for request in (*self.running, *waiting) if request.neuron.row is not None]
        sessions = [request for request in reserved if request.resumable and request not in set(self.running)]
        # Finished requests whose KV blocks a connector still reads.
        finished = [request for request in self.requests.values() if request.is_finished()]
        reserved_blocks = sum(
            request.neuron.worst_case_blocks for request in (*reserved, *finished) if request.neuron.row is not None
        )
        prefilling = [request for request in self.running if self._is_prefill_request(request)]
        slots_used = len(self.running) + len(sessions)
        restored = self._replaced_queues is None and not self._num_hidden and not self._selected
        invariants = {
            "an unfinished request is in one list only": len({id(r) for r in unfinished}) == len(unfinished),
            "every unfinished request is in a list": len(unfinished) + len(finished) == len(self.requests),
            "every running request has a reservation": all(r.neuron.row is not None for r in self.running),
            "running requests and paused sessions use the slots": self._gate.slots_used == slots_used,
            "reserved blocks are the sum of the reservations": self._gate.reserved == reserved_blocks,
            "the tracked prefilling requests are those that are prefilling": prefilling == self._prefilling,
            "no attribute of the base class is replaced": restored,
        }
        violated = [invariant for invariant, holds in invariants.items() if not holds]
        if violated:
            raise RuntimeError(f"neuron-sched: violated invariants: {'; '.join(violated)}")


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):
    """`NeuronScheduler` for an engine that schedules a step while another is in flight, as vLLM does by default."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if not self.num_spec_tokens:
            return
        # Near `max_model_len` the base class would cut the drafts to widths that no graph was compiled for. The drafts
        # stay off from then on: a rejected draft could lower the computed tokens below the limit again.
        last = self.max_model_len - 3 - 2 * self.num_spec_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                record = request.neuron
                record.drafts_allowed = record.drafts_allowed and request.num_computed_tokens <= last
                self._drop_disallowed_drafts(request)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Set the draft tokens of the next step, as vLLM does, except for requests without drafts.

        vLLM calls this in an engine without asynchronous scheduling.
        """
        super().update_draft_token_ids(draft_token_ids)
        for request_id in draft_token_ids.req_ids:
            self._drop_disallowed_drafts(self.requests.get(request_id))

    def _drop_disallowed_drafts(self, request: Request | None) -> None:
        if request is not None and not request.neuron.drafts_allowed:
            request.spec_token_ids = []
