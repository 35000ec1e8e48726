"""Steps with work but no scheduled token: counted, and of many in a row one line in the log."""

from __future__ import annotations

from collections.abc import Callable

from neuron_sched._native import Explanation
from neuron_sched.vllm.compat import logger

__all__ = ["Watchdog"]

PATIENCE = 100
"""Empty steps in a row for each warning."""


class Watchdog:
    """Told of every step."""

    def __init__(self) -> None:
        self.empty_steps = 0
        """Steps with work but no scheduled token, all in all."""
        self._in_a_row = 0

    def saw(self, scheduled: bool, has_work: bool, explain: Callable[[], Explanation | None]) -> None:
        """One step; `explain` is asked only for the warning."""
        if scheduled or not has_work:
            self._in_a_row = 0
            return
        self.empty_steps += 1
        self._in_a_row += 1
        if self._in_a_row % PATIENCE == 0:
            head = explain()
            logger.warning(
                "%d steps in a row had requests but scheduled nothing. %s",
                self._in_a_row,
                "Nobody waits to start; all are in flight."
                if head is None
                else f"Request {head.id!r} is the first that waits: {head.reason} (needs {head.needed} KV blocks at "
                f"worst, {head.reserved} of {head.usable} are reserved).",
            )
