"""The queue that the base class sees in place of its waiting queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

__all__ = ["HeadQueue"]


class HeadQueue(RequestQueue):
    """Replaces the waiting queue of the base class during one call and holds only the selected heads, in order.

    Once it is empty it asks `next_head` for another head, so that a head which the base class skips does not use up
    the admission of a later one. Requests that the base class puts back are collected in `returned` and are not offered
    again in this call.

    `num_hidden` returns the number of waiting requests that are hidden from the base class. `before_lookup` is called
    with a head before the base class examines it.
    """

    def __init__(
        self,
        heads: Iterable[Request],
        *,
        next_head: Callable[[], Request | None],
        num_hidden: Callable[[], int],
        before_lookup: Callable[[Request], None],
    ) -> None:
        self._heads = deque(heads)
        self._next_head = next_head
        self._num_hidden = num_hidden
        self._before_lookup = before_lookup
        self.returned: list[Request] = []

    def __bool__(self) -> bool:
        if not self._heads:
            head = self._next_head()
            if head is not None:
                self._heads.append(head)
        return bool(self._heads)

    def __len__(self) -> int:
        """Return the number of all waiting requests, hidden ones included, as the base class's counts require."""
        return len(self._heads) + len(self.returned) + self._num_hidden()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._heads)

    def peek_request(self) -> Request:
        self._before_lookup(self._heads[0])
        return self._heads[0]

    def pop_request(self) -> Request:
        return self._heads.popleft()

    def add_request(self, request: Request) -> None:
        self.returned.append(request)

    def prepend_request(self, request: Request) -> None:
        self.returned.append(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self.returned.extend(requests)

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        removed = set(requests)
        self._heads = deque(request for request in self._heads if request not in removed)
        self.returned = [request for request in self.returned if request not in removed]
