"""Watchdog for empty steps: steps with unfinished requests but no scheduled token."""

from __future__ import annotations

from collections.abc import Callable

from neuron_sched._native import Explanation
from neuron_sched.vllm.log import logger

__all__ = ["Watchdog"]

WARNING_INTERVAL = 100
"""Consecutive empty steps for each warning."""


class Watchdog:
    """Counts empty steps and warns after every `WARNING_INTERVAL` consecutive ones."""

    def __init__(self) -> None:
        self.empty_steps = 0
        """Number of empty steps so far."""
        self._consecutive = 0

    def record_step(self, scheduled: bool, has_work: bool, explain: Callable[[], Explanation | None]) -> None:
        """Record one step.

        `scheduled`: whether the step has a token. `has_work`: whether a request is unfinished. `explain`: returns why
        the head of the queue is waiting; called for a warning only.
        """
        if scheduled or not has_work:
            self._consecutive = 0
            return
        self.empty_steps += 1
        self._consecutive += 1
        if self._consecutive % WARNING_INTERVAL == 0:
            head = explain()
            logger.warning(
                "%d consecutive steps had unfinished requests but scheduled no token. %s",
                self._consecutive,
                "No request is waiting; all are in flight."
                if head is None
                else f"Request {head.id!r} is the head of the queue and waits with reason {head.reason!r} (worst case "
                f"{head.needed} KV blocks, {head.reserved} of {head.usable} reserved).",
            )
