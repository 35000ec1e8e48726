"""Tracking: reports to the gate each request that arrives, is admitted, or frees its slot or its KV blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from neuron_sched._native import Gate, NeuronConfig
from neuron_sched.vllm import compat, config, requirements
from neuron_sched.vllm.log import logger
from neuron_sched.vllm.record import AdmissionRecord, record_of

__all__ = ["TrackedScheduler"]


class TrackedScheduler(Scheduler):
    """The stock scheduler with reservations at the gate.

    Every method of the base class that moves a request is overridden to update the gate. Comparing lists of requests
    instead would cost more in a large decode step than all decisions of that step.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        requirements.warn_if_untested()
        requirements.require(Scheduler, requirements.METHODS)
        runs_ahead = bool(vllm_config.scheduler_config.async_scheduling)
        if runs_ahead and not isinstance(self, AsyncScheduler):
            raise ValueError(
                f"scheduler_cls: {type(self).__name__}: expected neuron_sched.NeuronAsyncScheduler with "
                "asynchronous scheduling, or --no-async-scheduling"
            )
        if vllm_config.model_config.is_encoder_decoder:
            raise ValueError(
                f"model: {vllm_config.model_config.model}: expected a decoder-only model, because KV blocks for "
                "the output of an encoder are not reserved"
            )
        self.neuron_config: NeuronConfig = config.read(vllm_config, kv_cache_config.num_blocks, runs_ahead=runs_ahead)
        # Requests that can never run, by id. They finish with an error in the next `update_from_output()`.
        self._unservable: dict[str, Request] = {}
        # Running requests with prompt tokens left to compute, in order of admission.
        self._prefilling: list[Request] = []
        # Running requests whose prompt has `max_model_len` tokens: they emit one token and never decode.
        self._never_decode: list[Request] = []
        # Waiting requests with a reservation: paused streaming sessions, and prompts whose KV a connector loads.
        self._waiting_reserved: set[Request] = set()
        # Number of running requests for each LoRA adapter id.
        self._running_loras: Counter[int] = Counter()
        self._last_queue_position = 0
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        requirements.require(self, requirements.ATTRIBUTES)
        self._gate = Gate(
            self.neuron_config,
            compat.kv_groups(self),
            slots_max=getattr(self, compat.active_limit(self)),
            watermark=self.kv_cache_manager.watermark_blocks,
            adaptive_threshold=bool(getattr(self, "adaptive_long_prefill_threshold", False)),
            decode_width=1 + self.num_spec_tokens,
        )

    # Arrival

    def add_request(self, request: Request) -> None:
        """Add a request, as the base class does. Drop it if an unfinished request has the same id.

        The base class raises in that case, which ends the engine.
        """
        known = self.requests.get(request.request_id)
        if known is not None and known.streaming_queue is None:
            logger.error(
                "Request %r is dropped: an unfinished request has the same id, and that request continues.",
                request.request_id,
            )
            return
        super().add_request(request)

    def _enqueue_waiting_request(self, request: Request) -> None:
        self._last_queue_position += 1
        record = record_of(request)
        if record is not None:
            # A resumed streaming session keeps its reservation.
            record.queue_position = self._last_queue_position
            self._waiting_reserved.add(request)
        else:
            try:
                worst_case = self._worst_case_blocks(request)
            except ValueError as error:
                logger.warning("Request %r can never run and finishes with an error: %s", request.request_id, error)
                self._unservable[request.request_id] = request
                return
            request.neuron = AdmissionRecord(worst_case, self._last_queue_position)
        super()._enqueue_waiting_request(request)

    def _worst_case_blocks(self, request: Request) -> int:
        """Return the most KV blocks that a request can need. Raise `ValueError` if it can never run."""
        outputs = min(max(0, request.max_tokens), self.max_model_len)
        return self._gate.needed_blocks(request.num_prompt_tokens, outputs, request.resumable)

    # Admission

    def _track_admission(self, request: Request) -> None:
        """Track a request that the base class has admitted. Its slot and its blocks are reserved already."""
        self._waiting_reserved.discard(request)
        if request.lora_request:
            request.neuron.lora_id = request.lora_request.lora_int_id
            self._running_loras[request.neuron.lora_id] += 1
        if request.num_prompt_tokens >= self.max_model_len:
            self._never_decode.append(request)
        self._track_prefill(request)

    def _track_prefill(self, request: Request) -> None:
        """Update the list of prefilling requests after the token counts of a running request have changed."""
        listed = request in self._prefilling
        if self._is_prefill_request(request):
            if not listed:
                self._prefilling.append(request)
        elif listed:
            self._prefilling.remove(request)

    def _is_prefill_request(self, request: Request) -> bool:
        """Return whether a request is prefilling. Outputs recomputed after a preemption count as prompt tokens."""
        return self._has_prompt_left(request, request.num_computed_tokens)

    def _has_prompt_left(self, request: Request, computed: int) -> bool:
        """Return whether prompt tokens are left when the first `computed` tokens of the request are computed."""
        return bool(computed < max(request.num_prompt_tokens, request.num_tokens - 1))

    # Departure

    def _untrack_running(self, request: Request) -> None:
        """Stop tracking a request as running. Its reservation stays."""
        for listed in (self._prefilling, self._never_decode):
            if request in listed:
                listed.remove(request)
        record = record_of(request)
        if record is not None and record.lora_id is not None:
            self._running_loras[record.lora_id] -= 1
            self._running_loras += Counter()  # removes counts of zero
            record.lora_id = None

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._unservable.pop(request.request_id, None)
        self._waiting_reserved.discard(request)
        self._untrack_running(request)
        record = record_of(request)
        if record is not None and record.row is not None:
            # The slot is free now. A connector may keep the blocks until it calls `_free_blocks`.
            self._gate.free_slot(record.row)
        return super()._free_request(request, *args, **kwargs)

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._release_reservation(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._untrack_running(request)
        self._release_reservation(request)

    def _release_reservation(self, request: Request) -> None:
        self._waiting_reserved.discard(request)
        record = record_of(request)
        if record is not None and record.row is not None:
            self._gate.release(record.row)
            record.row = None

    def _handle_stopped_request(self, request: Request) -> bool:
        finished = bool(super()._handle_stopped_request(request))
        if not finished:
            # A paused streaming session keeps its slot and its blocks until its next input.
            self._untrack_running(request)
        return finished

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """Add the next input to a streaming session. A session above `max_model_len` finishes with an error."""
        super()._update_request_as_session(session, update)
        if session.num_tokens > self.max_model_len:
            logger.warning(
                "Request %r cannot continue and finishes with an error: num_tokens: %d: expected at most "
                "max_model_len = %d",
                session.request_id,
                session.num_tokens,
                self.max_model_len,
            )
            self._unservable[session.request_id] = session

    def _update_requests_with_invalid_blocks(self, requests: Iterable[Request], *args: Any, **kwargs: Any) -> Any:
        """Recompute blocks whose load failed. A decoding request may be prefilling again afterwards."""
        affected = list(requests)
        result = super()._update_requests_with_invalid_blocks(affected, *args, **kwargs)
        for request in affected:
            if request.status == RequestStatus.RUNNING:
                self._track_prefill(request)
        if len(self._prefilling) > 1:
            index_of = {request: index for index, request in enumerate(self.running)}
            self._prefilling.sort(key=index_of.__getitem__)
        return result

    # Requests that can never run

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests, including those that can never run and are in no queue."""
        unfinished = int(super().get_num_unfinished_requests())
        if self._pause_state == PauseState.PAUSED_ALL:
            return unfinished
        return unfinished + sum(record_of(request) is None for request in self._unservable.values())

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """Process the output of a step, as the base class does, then finish requests that can never run.

        Only here can the base class report an error to a client: an exception in `add_request()` would end the engine.
        """
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self._unservable:
            finished = list(self._unservable.values())
            self.finish_requests(list(self._unservable), RequestStatus.FINISHED_ERROR)
            for request in finished:
                client_outputs = outputs.setdefault(request.client_index, EngineCoreOutputs())
                client_outputs.outputs.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=[],
                        finish_reason=request.get_finished_reason(),
                        events=request.take_events(),
                        trace_headers=request.trace_headers,
                    )
                )
        return outputs
