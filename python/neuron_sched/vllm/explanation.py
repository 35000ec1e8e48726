"""Explanation: why the head of the queue is waiting."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from neuron_sched._native import Explanation
from neuron_sched.vllm.admission import AdmittingScheduler

__all__ = ["ExplainingScheduler"]


class ExplainingScheduler(AdmittingScheduler):
    """Adds `explain()`, which combines the gate's answer with what the last step left waiting."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        # Ids of the requests that the last step scheduled.
        self._last_scheduled_ids: Collection[str] = ()
        self._num_steps_in_flight = 0

    def explain(self) -> Explanation | None:
        """Return why the head of the queue is waiting before the next `schedule()`, or `None` if no request is waiting.

        The reasons are those of `BucketScheduler.explain()`, and two more: `paused`, if the engine is paused, and
        `blocked`, if no waiting request is ready.
        """
        self._polled.clear()
        head = None if self._pause_state == PauseState.PAUSED_ALL else self._next_head()
        if head is None:
            head = self._first_waiting()
            if head is None:
                return None
            reason = "blocked" if self._pause_state == PauseState.UNPAUSED else "paused"
        else:
            reason = self._wait_reason(head)
        return self._gate.explanation(head.request_id, reason, head.neuron.worst_case_blocks)

    def _wait_reason(self, head: Request) -> str:
        self._gate.begin()
        reason = self._refusal_reason(head)
        last = self._last_refusal[1] if self._last_refusal is not None and self._last_refusal[0] is head else None
        if last is not None and not any(request_id in self.requests for request_id in self._last_scheduled_ids):
            last = None
        if reason in (None, "kv") and last in ("prefill_in_progress", "prefill_batch_full"):
            # These are tested before the KV cache, and hold while the step that had no capacity left is in flight.
            return last
        if reason is not None:
            return reason
        if last in ("interleave", "throttled"):
            return last
        if self._num_steps_in_flight:
            return "step_running"
        ready = self._gate.decode_ready(self.running, self.current_step + 1)
        return "interleave" if self._gate.interleaves(ready) else "ready"
