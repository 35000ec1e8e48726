"""The waiting requests that vLLM's scheduler gets to see, and the order in which requests wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

__all__ = ["Heads", "Ticket", "first_ready", "put_back", "take"]


@dataclass(slots=True)
class Ticket:
    """What our scheduler keeps of a request; lives on the request itself, so that no look-up is needed."""

    need: int
    """KV blocks at worst."""
    turn: int = 0
    """Order of arrival over all queues."""
    row: int | None = None
    """Handle at the gate, as long as the request holds a slot or KV blocks there."""
    adapter: int | None = None
    """LoRA adapter that it has loaded, while it runs."""
    drafts: bool = True
    """Whether it may still be given draft tokens."""


class Heads(RequestQueue):
    """Stands in for the base's waiting queue during one call and exposes admitted heads, one after the other.

    Once it has handed out what it exposes it asks `more` for another, so that a head which the base skips does not
    take the place of the next one. What the base gives back is kept apart: it is not offered again in this call.
    """

    def __init__(
        self,
        exposed: Iterable[Request],
        *,
        more: Callable[[], Request | None],
        hidden: Callable[[], int],
        look_up: Callable[[Request], None],
    ) -> None:
        self._exposed = deque(exposed)
        self._more = more
        self._hidden = hidden
        self._look_up = look_up
        self.returned: list[Request] = []

    def __bool__(self) -> bool:
        if not self._exposed:
            head = self._more()
            if head is not None:
                self._exposed.append(head)
        return bool(self._exposed)

    def __len__(self) -> int:
        """All who wait: the base's counts must not depend on what it can see."""
        return len(self._exposed) + len(self.returned) + self._hidden()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._exposed)

    def peek_request(self) -> Request:
        self._look_up(self._exposed[0])
        return self._exposed[0]

    def pop_request(self) -> Request:
        return self._exposed.popleft()

    def add_request(self, request: Request) -> None:
        self.returned.append(request)

    def prepend_request(self, request: Request) -> None:
        self.returned.append(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self.returned.extend(requests)

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        self._exposed = deque(request for request in self._exposed if request not in gone)
        self.returned = [request for request in self.returned if request not in gone]


def first_ready(queue: RequestQueue, ready: Callable[[Request], bool]) -> Request | None:
    """The first ready request of a queue; looks no further, so the cost depends on those that are not ready."""
    if isinstance(queue, deque):
        return next((request for request in queue if ready(request)), None)
    # A heap tells its order only by being emptied.
    passed = []
    while queue and not ready(queue.peek_request()):
        passed.append(queue.pop_request())
    found = queue.peek_request() if queue else None
    for request in passed:
        queue.add_request(request)
    return found


def take(queue: RequestQueue, request: Request) -> None:
    """Takes a request that is in the queue out of it, at the cost of those before it."""
    passed: deque[Request] = deque()
    while (head := queue.pop_request()) is not request:
        passed.appendleft(head)
    queue.prepend_requests(passed)


def put_back(queue: Any, request: Request) -> None:
    """Puts a request back in its turn, at the cost of those before it."""
    if not isinstance(queue, deque):
        queue.add_request(request)
        return
    turn = request.neuron.turn
    at = next((at for at, other in enumerate(queue) if other.neuron.turn > turn), len(queue))
    queue.insert(at, request)
