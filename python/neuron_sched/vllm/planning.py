"""Planning: chooses the phase of a step and calls the base class with the requests of that phase."""

from __future__ import annotations

import itertools
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from neuron_sched.vllm import compat
from neuron_sched.vllm.explanation import ExplainingScheduler
from neuron_sched.vllm.head_queue import HeadQueue
from neuron_sched.vllm.view import RestrictedView

__all__ = ["PlanningScheduler"]


class PlanningScheduler(ExplainingScheduler):
    """Plans a step by one call of the base class's `schedule()`, or by two.

    A prefill call shows the base class prompts only. If it schedules no token although a request could decode, a decode
    call follows in the same step; otherwise the same prompts could keep that request from decoding in every step. What
    the first call has reported only once is merged into the output of the second.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        # Running requests hidden from the base class during its current call.
        self._num_hidden = 0
        # Output and block state of an empty prefill call, until they are merged into an output that is returned.
        self._unreturned_output: SchedulerOutput | None = None
        self._unreturned_block_state: Any = None
        self._skip_empty_metadata = False

    def _plan(self, throttle_prefills: bool, *args: Any, **kwargs: Any) -> tuple[SchedulerOutput, bool, bool]:
        """Plan a step. Return its output, whether it is a prefill step, and whether prefills were throttled."""
        paused = self._pause_state == PauseState.PAUSED_ALL
        # If no slot is free, only a request with a reservation can be admitted. Without one the queues are not walked
        # and no blocked request is polled.
        full = self.at_capacity and not self._waiting_reserved and not self._prefilling
        head = None if paused or full else self._next_candidate()
        decode_ready = not paused and self._gate.decode_ready(self.running, self.current_step + 1)
        admissible = head is not None and self.can_schedule(head)
        joining = head if head is not None and admissible and self._starts_decoding(head) else None
        throttled = decode_ready and compat.throttles_prefills(self, throttle_prefills)
        prefill_wanted = not paused and (self.has_prefill_in_running or (admissible and joining is None))
        kind, interleaved = self._gate.decide(prefill_wanted, decode_ready or joining is not None, throttled)
        if kind == "prefill":
            output = self._prefill_call(head, decode_ready, *args, **kwargs)
            if output.total_num_scheduled_tokens or not decode_ready:
                return output, True, throttled
        elif head is not None and joining is None:
            self._last_refusal = (head, self._refusal_reason(head) or ("interleave" if interleaved else "throttled"))
        output = self._decode_call(joining, throttle_prefills, *args, **kwargs)
        return output, False, throttled

    def _call_base_schedule(self, throttle_prefills: bool = False, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Call `schedule()` of vLLM's `Scheduler`, or of its `AsyncScheduler` for the async class."""
        return super().schedule(throttle_prefills, *args, **kwargs)

    def _prefill_call(self, head: Request | None, decode_ready: bool, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Call the base class with prefilling requests only or, if there are none, with heads of the queue only."""
        num_requests = self._num_requests()
        head_queue: HeadQueue | None = None
        visible: list[Request] = []
        if self._prefilling:
            for request in self._prefilling:
                if not self._gate.pack(self._num_tokens_left(request), num_requests):
                    break
                visible.append(request)
            first = visible[0]
            self._last_refusal = None if head is None else (head, "prefill_in_progress")
        else:
            assert head is not None, "a prefill step without a prompt"
            first = head
            self._select(head)
            while self._select_next() is not None:
                pass
            head_queue = self._head_queue(self._select_next)
        overrides: list[tuple[Any, str, Any]] = []
        budget = self._gate.budget(self._num_tokens_left(first), num_requests)
        if budget < self.max_num_scheduled_tokens:
            overrides.append((self, "max_num_scheduled_tokens", budget))
        if num_requests == 1 and compat.caps_single_prompt(self):
            overrides.append((self.scheduler_config, "long_prefill_token_threshold", 0))
        if any(request.num_tokens >= self.max_model_len for request in visible):
            # The base class reserves the last position for an output, so it would not schedule the last prompt token.
            overrides.append((self, "max_model_len", self.max_model_len + 1))
        overrides += compat.overrides_against_draft_padding(self)
        if decode_ready:
            overrides += compat.overrides_against_empty_metadata(self)
        scheduled_before = set(self.prev_step_scheduled_req_ids) if decode_ready else set()
        # Throttling is part of the choice of the phase already, so the base class is not asked to throttle.
        view = RestrictedView(self, visible, head_queue, overrides)
        output = self._restricted_call(view, decode_ready, False, *args, **kwargs)
        if decode_ready and not output.total_num_scheduled_tokens:
            compat.repeat_step(self, scheduled_before)
            compat.restore_reported_ids(self, output)
            self._merge_unreturned(output)
            self._unreturned_output = output
        return output

    def _decode_call(self, joining: Request | None, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Call the base class with decoding requests only. `joining` is the one waiting request that it may admit."""
        visible: list[Request] | None = None
        head_queue: HeadQueue | None = None
        if self._prefilling or self._never_decode:
            hidden = {*self._prefilling, *self._never_decode}
            # No Python loop: the batch may be large.
            visible = list(itertools.filterfalse(hidden.__contains__, self.running))
        if joining is not None:
            self._select(joining)
            head_queue = self._head_queue(lambda: None)
        return self._restricted_call(RestrictedView(self, visible, head_queue, []), False, *args, **kwargs)

    def _restricted_call(
        self, view: RestrictedView, skip_empty_metadata: bool, *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        """Call the base class once. Restore its attributes and settle the selected heads, even if it raises."""
        self._skip_empty_metadata = skip_empty_metadata
        self._num_hidden = view.num_hidden
        try:
            with view:
                return self._call_base_schedule(*args, **kwargs)
        finally:
            self._skip_empty_metadata = False
            self._num_hidden = 0
            self._settle_selection(view.admitted, view.returned)

    def _merge_unreturned(self, output: SchedulerOutput) -> None:
        """Add the one-time fields of an output that was not returned."""
        if self._unreturned_output is not None:
            compat.merge_one_time_fields(self._unreturned_output, output)
            self._unreturned_output = None

    def get_request_counts(self) -> tuple[int, int]:
        """Return the number of running and of waiting requests, including those hidden from the base class."""
        running, waiting = super().get_request_counts()
        return running + self._num_hidden, waiting

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> Any:
        """Build the connector's metadata once a step: not for an empty prefill call that a decode call follows."""
        block_state = getattr(scheduler_output, "kv_connector_block_state", None)
        if self._skip_empty_metadata and not scheduler_output.total_num_scheduled_tokens:
            self._unreturned_block_state = block_state
            return None
        if self._unreturned_block_state is not None:
            scheduler_output.kv_connector_block_state = compat.merge_block_states(
                self._unreturned_block_state, block_state
            )
            self._unreturned_block_state = None
        return super()._build_kv_connector_meta(connector, scheduler_output)
