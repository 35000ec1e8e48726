"""Who may start next: the order over all waiting queues, the core's verdict, and the heads that the base is shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from neuron_sched._native import Explanation
from neuron_sched.vllm import compat
from neuron_sched.vllm.heads import Heads, Ticket, first_ready, put_back, take
from neuron_sched.vllm.tracking import TrackedScheduler

__all__ = ["AdmittingScheduler"]


class AdmittingScheduler(TrackedScheduler):
    """Admission over the base's own queues."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        # Heads that this call shows to the base, in order, with the tokens that each has to compute.
        self._chosen: dict[Request, int] = {}
        # Those of them that the base has passed over in this step, and those that it has not.
        self._passed: set[Request] = set()
        self._together: list[Request] = []
        # Those of them that held blocks before.
        self._held_before: set[Request] = set()
        # The waiting queues, while others stand in for them.
        self._set_aside: tuple[RequestQueue, RequestQueue] | None = None
        self._prefix_stats = compat.PrefixStats(self)
        # Blocked requests that were asked in this call and are not ready.
        self._polled: set[Request] = set()
        # The head that the last step left waiting, and why; and the ids of that step.
        self._left: tuple[Request, str] | None = None
        self._last_step: Collection[str] = ()
        # Steps that were scheduled and whose output has not come.
        self._num_in_flight = 0

    def _begin(self) -> None:
        """Starts to plan a step."""
        self._left = None
        self._polled.clear()
        self._passed.clear()
        self._gate.begin()

    # The verdict

    def can_schedule(self, request: Request) -> bool:
        """Whether a waiting request may start now."""
        return self.refusal(request) is None

    def refusal(self, request: Request) -> str | None:
        """Why a waiting request may not start now, as a stable name; None when it may.

        The names are those of `BucketScheduler.explain()`. An override may give names of its own.
        """
        ticket = getattr(request, "neuron", None)
        if ticket is None:
            ticket = Ticket(self._need(request))
        return self._gate.refuse(
            ticket.need,
            self._rest(request),
            self._num_requests(),
            row=ticket.row,
            prefill_in_progress=self.has_prefill_in_running and not self._joins_decode(request),
        )

    def _reason(self, request: Request) -> str | None:
        """As `refusal()`, with a name for a refusal by an override of `can_schedule()`."""
        return None if self.can_schedule(request) else self.refusal(request) or "can_schedule"

    @property
    def at_capacity(self) -> bool:
        """Whether every slot is held."""
        return bool(self._gate.seated >= getattr(self, compat.active_limit(self)))

    @property
    def has_prefill_in_running(self) -> bool:
        """Whether a running request has prompt tokens left."""
        return bool(self._prefilling)

    def explain(self) -> Explanation | None:
        """Why the head of the queue waits, before the next `schedule()`; None when nobody waits.

        `paused` and `blocked` (nobody who waits is ready) besides the reasons of `BucketScheduler.explain()`.
        """
        self._polled.clear()
        head = None if self._pause_state == PauseState.PAUSED_ALL else self._next_head()
        if head is None:
            head = self._first_in_line()
            if head is None:
                return None
            reason = "blocked" if self._pause_state == PauseState.UNPAUSED else "paused"
        else:
            reason = self._why_waits(head)
        return self._gate.explanation(head.request_id, reason, head.neuron.need)

    def _why_waits(self, head: Request) -> str:
        self._gate.begin()
        reason = self._reason(head)
        left = self._left[1] if self._left is not None and self._left[0] is head else None
        if left is not None and not any(request_id in self.requests for request_id in self._last_step):
            left = None
        if reason in (None, "kv") and left in ("prefill_in_progress", "prefill_batch_full"):
            # Tested before the cache; true while the step that left no room is in flight.
            return left
        if reason is not None:
            return reason
        if left in ("interleave", "throttled"):
            return left
        if self._num_in_flight:
            return "step_running"
        ready = self._gate.decode_ready(self.running, self.current_step + 1)
        return "interleave" if self._gate.interleaves(ready) else "ready"

    # The order

    def _next_candidate(self) -> Request | None:
        """Who is to start next: the head, or, where that is refused, the first that may start and holds blocks.

        Such a one gives nothing back while it waits, so it must not wait for one that waits for what it holds.
        """
        head = self._next_head()
        if head is None or self.can_schedule(head):
            return head
        holders = sorted(self._waiting_holders, key=self._order)
        ready = (request for request in holders if self._is_ready(request) and self.can_schedule(request))
        return next(ready, head)

    def _ready_left(self) -> bool:
        """Whether a ready request waits that was not offered to the base in this step."""
        if self.at_capacity:
            return compat.waits_unblocked(self)
        return self._next_head(passed=self._passed) is not None

    def _queues(self) -> tuple[RequestQueue, RequestQueue]:
        """The base's waiting queues, of plain waiters and of those set apart, whatever stands in for them now."""
        if self._set_aside is not None:
            return self._set_aside
        plain, apart = compat.waiting_queues(self)
        return getattr(self, plain), getattr(self, apart)

    def _next_head(self, passed: Collection[Request] = ()) -> Request | None:
        """The first ready request in order of arrival, or of priority, over all queues; not one of `passed`."""

        def ready(request: Request) -> bool:
            return request not in passed and self._is_ready(request)

        found = [first_ready(queue, ready) for queue in compat.candidate_queues(self, *self._queues())]
        return min((head for head in found if head is not None), key=self._order, default=None)

    def _first_in_line(self) -> Request | None:
        """The first that waits, ready or not."""
        return min((queue.peek_request() for queue in self._queues() if queue), key=self._order, default=None)

    def _order(self, request: Request) -> Any:
        return request.neuron.turn if self.policy.value == "fcfs" else request

    def _is_ready(self, request: Request) -> bool:
        if request.request_id in self._unservable:
            return False
        if compat.is_blocked(self, request) and (request in self._polled or not compat.promote(self, request)):
            self._polled.add(request)
            return False
        return self._lora_fits(request) and not compat.stale_in_flight(request)

    def _num_requests(self) -> int:
        """Requests that run or wait, those included that are between the queues in this call."""
        running, waiting = self.get_request_counts()
        between = len(self._chosen) if self._set_aside is None else len(self._passed)
        return int(running) + int(waiting) + between

    def _lora_fits(self, request: Request) -> bool:
        """Whether its adapter may be loaded besides those of all running requests, hidden or not."""
        lora = request.lora_request
        if self.lora_config is None or lora is None:
            return True
        starting = (other.lora_request for other in self._together)
        loaded = self._loras.keys() | {other.lora_int_id for other in starting if other is not None}
        return lora.lora_int_id in loaded or len(loaded) < self.lora_config.max_loras

    def _rest(self, request: Request) -> int:
        """Tokens left to compute; of one that has not started all of them, whatever the prefix cache holds."""
        return int(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)

    def _joins_decode(self, request: Request) -> bool:
        """Whether it only recomputes its last token, as on the decode node of a disaggregated pair: it then counts
        as a decode, and starts beside those that decode."""
        return self._is_remote(request) and request.num_computed_tokens >= request.num_tokens - 1 > 0

    def _is_remote(self, request: Request) -> bool:
        """Whether another node computes its prompt."""
        params = request.kv_transfer_params
        return self.connector is not None and bool(params) and not params.get("do_remote_decode")

    # The heads that the base is shown

    def _choose(self, request: Request) -> bool:
        """Takes a waiting request out of its queue, with a slot and its blocks reserved, to be shown to the base.

        False, and nothing is changed, when it does not fit beside the prompts that were chosen before it.
        """
        rest = self._rest(request)
        if not self._gate.pack(rest, self._num_requests()):
            return False
        plain, apart = self._queues()
        # A request that was blocked may be among those set apart; the long queue is not walked to find out.
        take(apart if any(other is request for other in apart) else plain, request)
        self._chosen[request] = rest
        self._together.append(request)
        ticket = request.neuron
        if ticket.row is None:
            ticket.row = self._gate.enter(ticket.need)
        else:
            self._held_before.add(request)
            self._gate.seat(ticket.row)
        return True

    def _choose_next(self) -> Request | None:
        """Chooses one more prompt for the step, if the next head may start in it too."""
        head = self._next_head(passed=self._passed)
        if head is None:
            return None
        # What the other node has computed is known only once the base has asked; until then it shares no step.
        if self._together and any(self._is_remote(request) for request in (head, *self._together)):
            return None
        reason = self._reason(head)
        if reason is None and self._choose(head):
            return head
        self._left = (head, reason or "prefill_batch_full")
        return None

    def _heads(self, choose_next: Callable[[], Request | None]) -> Heads:
        """The chosen heads as a queue; it asks for more once the base has taken or passed over all of them."""
        queues = self._set_aside = self._queues()

        def more() -> Request | None:
            for request in [other for other in self._together if other.status != RequestStatus.RUNNING]:
                self._pass_over(request)
            return choose_next()

        return Heads(self._chosen, more=more, hidden=lambda: sum(map(len, queues)), look_up=self._prefix_stats.look_up)

    def _pass_over(self, request: Request) -> None:
        """Takes back what was reserved for a chosen head that the base did not start."""
        self._passed.add(request)
        self._together.remove(request)
        self._gate.unpack(self._chosen[request])
        ticket = request.neuron
        if ticket.row is None:
            return
        if compat.loads_remote_kv(request) or request in self._held_before:
            # It holds blocks. A session that was continued has its slot for as long as it lives.
            if not request.resumable:
                self._gate.unseat(ticket.row)
            return
        self._gate.leave(ticket.row)
        ticket.row = None

    def _settle(self, newcomers: Sequence[Request] = (), returned: Sequence[Request] = ()) -> None:
        """After a call of the base: counts whom it started, and puts everybody else back in his turn.

        `returned`: whom the base has put into the queues that stood in for its own.
        """
        self._prefix_stats.settle()
        started = set(newcomers)
        for request in [other for other in self._together if other not in started]:
            self._pass_over(request)
        waiting = [request for request in dict.fromkeys((*self._chosen, *returned)) if request not in started]
        self._chosen, self._together, self._held_before, self._set_aside = {}, [], set(), None
        plain, apart = self._queues()
        # They were taken in turn, so the last one first: each then finds its place at the front.
        for request in reversed(waiting):
            if request.neuron.row is not None:
                self._waiting_holders.add(request)
            put_back(apart if compat.waits_apart(self, request) else plain, request)
        for request in newcomers:
            self._admit(request)
        for request in list(self._prefilling):
            self._track_prefill(request)
