"""Admission: picks the next head across the waiting queues and builds the queue that the base class sees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from neuron_sched.vllm import compat
from neuron_sched.vllm.head_queue import HeadQueue
from neuron_sched.vllm.record import AdmissionRecord, record_of
from neuron_sched.vllm.request_queues import first_match, reinsert, remove
from neuron_sched.vllm.tracking import TrackedScheduler

__all__ = ["AdmittingScheduler"]


class AdmittingScheduler(TrackedScheduler):
    """Admission from the waiting queues of the base class.

    A head is *selected* when it is taken out of its queue, with a slot and its worst case reserved, to be shown to the
    base class. The base class then admits it or skips it. The reservation of a skipped head is released and the request
    is reinserted at its queue position.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        # Heads selected for the current call of the base class, in order, with the tokens that each has to compute.
        self._selected: dict[Request, int] = {}
        # Those of them that the base class has not skipped; their prompts are packed into the step.
        self._packed: list[Request] = []
        # Those of them that had a reservation before they were selected.
        self._reserved_before: set[Request] = set()
        # Heads that the base class has skipped in this step.
        self._skipped: set[Request] = set()
        # The waiting queues of the base class while they are replaced.
        self._replaced_queues: tuple[RequestQueue, RequestQueue] | None = None
        self._prefix_stats = compat.PrefixLookupStats(self)
        # Blocked requests found not ready in this call. Each is polled once a call.
        self._polled: set[Request] = set()
        # Head that the last step did not admit, with the reason.
        self._last_refusal: tuple[Request, str] | None = None

    def _begin_step(self) -> None:
        """Reset what is kept for one step."""
        self._last_refusal = None
        self._polled.clear()
        self._skipped.clear()
        self._gate.begin()

    # Whether a request fits

    def can_schedule(self, request: Request) -> bool:
        """Return whether a waiting request can be admitted now."""
        return self.refusal(request) is None

    def refusal(self, request: Request) -> str | None:
        """Return the reason why a waiting request cannot be admitted now, or `None` if it can.

        The reasons are those of `BucketScheduler.explain()`. An override may return reasons of its own.
        """
        record = record_of(request) or AdmissionRecord(self._worst_case_blocks(request))
        return self._gate.refuse(
            record.worst_case_blocks,
            self._num_tokens_left(request),
            self._num_requests(),
            row=record.row,
            prefill_in_progress=self.has_prefill_in_running and not self._starts_decoding(request),
        )

    def _refusal_reason(self, request: Request) -> str | None:
        """Return `refusal()`, or `can_schedule` if only an override of `can_schedule()` refuses the request."""
        return None if self.can_schedule(request) else self.refusal(request) or "can_schedule"

    @property
    def at_capacity(self) -> bool:
        """Whether no slot is free."""
        return bool(self._gate.slots_used >= getattr(self, compat.active_limit(self)))

    @property
    def has_prefill_in_running(self) -> bool:
        """Whether a running request is prefilling."""
        return bool(self._prefilling)

    def _num_requests(self) -> int:
        """Return the number of running and waiting requests, including those in no queue during this call."""
        running, waiting = self.get_request_counts()
        unqueued = len(self._selected) if self._replaced_queues is None else len(self._skipped)
        return int(running) + int(waiting) + unqueued

    def _lora_fits(self, request: Request) -> bool:
        """Return whether the request's LoRA adapter fits beside those of all running requests, hidden or not."""
        lora = request.lora_request
        if self.lora_config is None or lora is None:
            return True
        selected = (other.lora_request for other in self._packed)
        loaded = self._running_loras.keys() | {other.lora_int_id for other in selected if other is not None}
        return lora.lora_int_id in loaded or len(loaded) < self.lora_config.max_loras

    def _num_tokens_left(self, request: Request) -> int:
        """Return the number of tokens left to compute. Prefix-cache hits of a waiting request are not deducted."""
        return int(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)

    def _starts_decoding(self, request: Request) -> bool:
        """Return whether only the last token of a remotely computed prompt is left.

        This is the case on the decode node of a disaggregated pair. The token is computed as a decode row, so the
        request is admitted in a decode step.
        """
        return self._has_remote_prefill(request) and request.num_computed_tokens >= request.num_tokens - 1 > 0

    def _may_start_decoding(self, request: Request) -> bool:
        """Return whether only a decode row of a waiting request may be left once its cached tokens are known.

        A decode row shares no prefill step. Only the base class looks up cached tokens, and that is too late for the
        selection. Another node may have computed all but the last token of a prompt, and the prefix cache may hold all
        but the last token of a resumed request with outputs.
        """
        if self._has_remote_prefill(request):
            return True
        has_outputs = request.num_tokens > request.num_prompt_tokens
        return has_outputs and (bool(self.cache_config.enable_prefix_caching) or self.connector is not None)

    def _has_remote_prefill(self, request: Request) -> bool:
        """Return whether another node computes the prompt of the request."""
        params = request.kv_transfer_params
        return self.connector is not None and bool(params) and not params.get("do_remote_decode")

    # Queue order

    def _next_candidate(self) -> Request | None:
        """Return the request to admit next: the head, or a later request with a reservation if the head is refused.

        A waiting request with a reservation frees no KV blocks, so it must not wait for a head that waits for them.
        """
        head = self._next_head()
        if head is None or self.can_schedule(head):
            return head
        reserved = sorted(self._waiting_reserved, key=self._order_key)
        admissible = (request for request in reserved if self._is_ready(request) and self.can_schedule(request))
        return next(admissible, head)

    def _ready_request_remains(self) -> bool:
        """Return whether a ready request is waiting that was not offered to the base class in this step."""
        if self.at_capacity:
            return compat.any_unblocked_waiting(self)
        return self._next_head(excluded=self._skipped) is not None

    def _waiting_queues(self) -> tuple[RequestQueue, RequestQueue]:
        """Return the primary and the secondary waiting queue of the base class, even while they are replaced."""
        if self._replaced_queues is not None:
            return self._replaced_queues
        primary, secondary = compat.waiting_queues(self)
        return getattr(self, primary), getattr(self, secondary)

    def _next_head(self, excluded: Collection[Request] = ()) -> Request | None:
        """Return the first ready request over all queues, by arrival or by priority, that is not in `excluded`."""

        def is_next(request: Request) -> bool:
            return request not in excluded and self._is_ready(request)

        heads = [first_match(queue, is_next) for queue in compat.candidate_queues(self, *self._waiting_queues())]
        return min((head for head in heads if head is not None), key=self._order_key, default=None)

    def _first_waiting(self) -> Request | None:
        """Return the first waiting request over all queues, whether it is ready or not."""
        first = (queue.peek_request() for queue in self._waiting_queues() if queue)
        return min(first, key=self._order_key, default=None)

    def _order_key(self, request: Request) -> Any:
        return request.neuron.queue_position if self.policy.value == "fcfs" else request

    def _is_ready(self, request: Request) -> bool:
        """Return whether nothing outside the scheduler keeps a waiting request from being admitted."""
        if request.request_id in self._unservable:
            return False
        if compat.is_blocked(self, request) and (request in self._polled or not compat.promote_if_ready(self, request)):
            self._polled.add(request)
            return False
        return self._lora_fits(request) and not compat.has_stale_output_in_flight(request)

    # Selected heads

    def _select(self, request: Request) -> bool:
        """Select a waiting request: take it out of its queue and reserve a slot and its worst case.

        Return `False`, with nothing changed, if its prompt does not fit beside those packed before it.
        """
        tokens = self._num_tokens_left(request)
        if not self._gate.pack(tokens, self._num_requests()):
            return False
        primary, secondary = self._waiting_queues()
        # A request that was blocked may be in the secondary queue. Only that one is searched, since it is short.
        remove(secondary if any(other is request for other in secondary) else primary, request)
        self._selected[request] = tokens
        self._packed.append(request)
        record = request.neuron
        if record.row is None:
            record.row = self._gate.admit(record.worst_case_blocks)
        else:
            self._reserved_before.add(request)
            self._gate.take_slot(record.row)
        return True

    def _select_next(self) -> Request | None:
        """Select one more prompt for the step, if the next head fits too. Return it, or `None`."""
        head = self._next_head(excluded=self._skipped)
        if head is None:
            return None
        if self._packed and any(self._may_start_decoding(request) for request in (head, *self._packed)):
            return None
        reason = self._refusal_reason(head)
        if reason is None and self._select(head):
            return head
        self._last_refusal = (head, reason or "prefill_batch_full")
        return None

    def _head_queue(self, select_next: Callable[[], Request | None]) -> HeadQueue:
        """Return the selected heads as a queue, which calls `select_next` when all of them are admitted or skipped."""
        queues = self._replaced_queues = self._waiting_queues()

        def next_head() -> Request | None:
            for request in [other for other in self._packed if other.status != RequestStatus.RUNNING]:
                self._skip(request)
            return select_next()

        return HeadQueue(
            self._selected,
            next_head=next_head,
            num_hidden=lambda: sum(map(len, queues)),
            before_lookup=self._prefix_stats.before_lookup,
        )

    def _skip(self, request: Request) -> None:
        """Release what was reserved for a selected head that the base class did not admit."""
        self._skipped.add(request)
        self._packed.remove(request)
        self._gate.unpack(self._selected[request])
        record = request.neuron
        if record.row is None:
            return
        if compat.is_loading_remote_kv(request) or request in self._reserved_before:
            # It keeps its KV blocks. A streaming session keeps its slot as well until it finishes.
            if not request.resumable:
                self._gate.free_slot(record.row)
            return
        self._gate.release(record.row)
        record.row = None

    def _settle_selection(self, admitted: Sequence[Request] = (), returned: Sequence[Request] = ()) -> None:
        """Track the admitted requests after a call of the base class, and reinsert all others into their queues.

        `returned`: requests that the base class has put into the queues that replaced its own.
        """
        self._prefix_stats.finish_lookup()
        admitted_set = set(admitted)
        for request in [other for other in self._packed if other not in admitted_set]:
            self._skip(request)
        waiting = [request for request in dict.fromkeys((*self._selected, *returned)) if request not in admitted_set]
        self._selected, self._packed, self._reserved_before, self._replaced_queues = {}, [], set(), None
        primary, secondary = self._waiting_queues()
        # The heads were removed in queue order, so in reverse order each is reinserted at the front.
        for request in reversed(waiting):
            if request.neuron.row is not None:
                self._waiting_reserved.add(request)
            reinsert(secondary if compat.belongs_in_secondary_queue(self, request) else primary, request)
        for request in admitted:
            self._track_admission(request)
        for request in list(self._prefilling):
            self._track_prefill(request)
