"""Operations on vLLM's request queues that preserve the order of the other requests.

A queue is a deque (first come, first served) or a heap (priority). Each operation visits only the requests ahead of the
one that it returns, removes or inserts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

__all__ = ["first_match", "reinsert", "remove"]


def first_match(queue: RequestQueue, matches: Callable[[Request], bool]) -> Request | None:
    """Return the first request in queue order for which `matches` is true, or `None`. The queue is unchanged."""
    if isinstance(queue, deque):
        return next((request for request in queue if matches(request)), None)
    # A heap yields its order only when it is popped.
    popped = []
    while queue and not matches(queue.peek_request()):
        popped.append(queue.pop_request())
    found = queue.peek_request() if queue else None
    for request in popped:
        queue.add_request(request)
    return found


def remove(queue: RequestQueue, request: Request) -> None:
    """Remove a request that is in the queue. O(requests ahead of it)."""
    ahead: deque[Request] = deque()
    while (head := queue.pop_request()) is not request:
        ahead.appendleft(head)
    queue.prepend_requests(ahead)


def reinsert(queue: Any, request: Request) -> None:
    """Reinsert a request at its original queue position. O(requests ahead of it)."""
    if not isinstance(queue, deque):
        queue.add_request(request)
        return
    position = request.neuron.queue_position
    index = next((index for index, other in enumerate(queue) if other.neuron.queue_position > position), len(queue))
    queue.insert(index, request)
