"""What the base sees during one call, and how everything is put back."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.request import Request

from neuron_sched.vllm import compat
from neuron_sched.vllm.heads import Heads

__all__ = ["View"]


class View:
    """Swaps attributes of a scheduler for one call of the base; on exit each is again the object that it was.

    `visible`: running requests that the base may see, None for all. `heads`: who may be admitted, None for nobody.
    `others`: further attributes as (owner, name, value).
    """

    def __init__(
        self,
        scheduler: Any,
        visible: list[Request] | None,
        heads: Heads | None,
        others: list[tuple[Any, str, Any]],
    ) -> None:
        self._scheduler = scheduler
        self._running: list[Request] = scheduler.running
        self._visible = visible
        self._num_seen = len(scheduler.running if visible is None else visible)
        self._heads = heads
        self._others = others
        self._saved: list[tuple[Any, str, Any]] = []
        self.newcomers: list[Request] = []
        """Requests that the base has admitted, in order."""
        self.returned: list[Request] = []
        """Requests that the base has put into the queues that stood in for its own."""

    @property
    def num_hidden(self) -> int:
        """Running requests that the base does not see."""
        return len(self._running) - self._num_seen

    def __enter__(self) -> View:
        scheduler = self._scheduler
        if self._visible is not None:
            self._swap(scheduler, "running", list(self._visible))
        if self._heads is not None:
            exposing = compat.exposing_queue(scheduler)
            for name in compat.waiting_queues(scheduler):
                self._swap(scheduler, name, self._heads if name == exposing else create_request_queue(scheduler.policy))
            self._lower(self.num_hidden)
        elif any(getattr(scheduler, name) for name in compat.waiting_queues(scheduler)):
            self._lower(self.num_hidden)
            limit = compat.active_limit(scheduler)
            self._swap(scheduler, limit, compat.closed_limit(scheduler, self._num_seen))
        for owner, name, value in self._others:
            self._swap(owner, name, value)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        scheduler, seen = self._scheduler, self._scheduler.running
        stood_in = [getattr(scheduler, name) for name in compat.waiting_queues(scheduler)]
        for owner, name, value in reversed(self._saved):
            setattr(owner, name, value)
        if self._heads is not None:
            for queue in stood_in:
                self.returned.extend(self._heads.returned if queue is self._heads else queue)
        if self._visible is None or seen[: self._num_seen] == self._visible:
            self.newcomers = seen[self._num_seen :]
            # Where nobody is hidden the base has worked on the list itself.
            if self._visible is not None:
                self._running.extend(self.newcomers)
        else:
            # It has preempted some of those that it saw.
            before = set(self._visible)
            self.newcomers = [request for request in seen if request not in before]
            gone = before.difference(seen)
            self._running[:] = [request for request in self._running if request not in gone] + self.newcomers

    def _lower(self, hidden: int) -> None:
        if hidden:
            for name in {"max_num_running_reqs", compat.active_limit(self._scheduler)}:
                self._swap(self._scheduler, name, getattr(self._scheduler, name) - hidden)

    def _swap(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
