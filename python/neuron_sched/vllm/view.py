"""The restricted view that the base class has of the scheduler during one call."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.request import Request

from neuron_sched.vllm import compat
from neuron_sched.vllm.head_queue import HeadQueue

__all__ = ["RestrictedView"]


class RestrictedView:
    """Replaces attributes of a scheduler for one call of the base class, and restores the same objects on exit.

    `visible`: the running requests that the base class sees; `None` for all. `head_queue`: the requests that it may
    admit; `None` to admit no request. `overrides`: further attributes, as (owner, name, value).
    """

    def __init__(
        self,
        scheduler: Any,
        visible: list[Request] | None,
        head_queue: HeadQueue | None,
        overrides: list[tuple[Any, str, Any]],
    ) -> None:
        self._scheduler = scheduler
        self._running: list[Request] = scheduler.running
        self._visible = visible
        self._num_visible = len(scheduler.running if visible is None else visible)
        self._head_queue = head_queue
        self._overrides = overrides
        self._saved: list[tuple[Any, str, Any]] = []
        self.admitted: list[Request] = []
        """Requests that the base class has admitted, in order. Set on exit."""
        self.returned: list[Request] = []
        """Requests that the base class has put into the queues that replaced its own. Set on exit."""

    @property
    def num_hidden(self) -> int:
        """Number of running requests hidden from the base class."""
        return len(self._running) - self._num_visible

    def __enter__(self) -> RestrictedView:
        scheduler = self._scheduler
        if self._visible is not None:
            self._replace(scheduler, "running", list(self._visible))
        if self._head_queue is not None:
            admitting = compat.admitting_queue(scheduler)
            for name in compat.waiting_queues(scheduler):
                queue = self._head_queue if name == admitting else create_request_queue(scheduler.policy)
                self._replace(scheduler, name, queue)
            self._lower_limits(self.num_hidden)
        elif any(getattr(scheduler, name) for name in compat.waiting_queues(scheduler)):
            self._lower_limits(self.num_hidden)
            limit = compat.active_limit(scheduler)
            self._replace(scheduler, limit, compat.closed_limit(scheduler, self._num_visible))
        for owner, name, value in self._overrides:
            self._replace(owner, name, value)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        scheduler, seen = self._scheduler, self._scheduler.running
        replacements = [getattr(scheduler, name) for name in compat.waiting_queues(scheduler)]
        for owner, name, value in reversed(self._saved):
            setattr(owner, name, value)
        if self._head_queue is not None:
            for queue in replacements:
                self.returned.extend(self._head_queue.returned if queue is self._head_queue else queue)
        if self._visible is None or seen[: self._num_visible] == self._visible:
            self.admitted = seen[self._num_visible :]
            # Without a replaced list the base class has appended to the scheduler's own.
            if self._visible is not None:
                self._running.extend(self.admitted)
        else:
            # The base class has preempted visible requests.
            before = set(self._visible)
            self.admitted = [request for request in seen if request not in before]
            preempted = before.difference(seen)
            self._running[:] = [request for request in self._running if request not in preempted] + self.admitted

    def _lower_limits(self, num_hidden: int) -> None:
        """Lower the limits on running and on active requests by the number of hidden requests."""
        if num_hidden:
            for name in {"max_num_running_reqs", compat.active_limit(self._scheduler)}:
                self._replace(self._scheduler, name, getattr(self._scheduler, name) - num_hidden)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
