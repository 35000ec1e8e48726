"""The base scheduler, with the core told who holds a slot and KV blocks."""

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
from neuron_sched.vllm import compat, config
from neuron_sched.vllm.compat import logger
from neuron_sched.vllm.heads import Ticket

__all__ = ["TrackedScheduler"]


class TrackedScheduler(Scheduler):
    """Learns of every change from the method of the base that makes it, never by comparing lists."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        compat.warn_of_release()
        compat.require(Scheduler, compat.METHODS)
        runs_ahead = bool(vllm_config.scheduler_config.async_scheduling)
        if runs_ahead and not isinstance(self, AsyncScheduler):
            raise ValueError(
                f"scheduler_cls: {type(self).__name__}: expected neuron_sched.NeuronAsyncScheduler under an engine "
                "that schedules asynchronously, or --no-async-scheduling"
            )
        if vllm_config.model_config.is_encoder_decoder:
            raise ValueError(
                f"model: {vllm_config.model_config.model}: expected a decoder-only model; the blocks of an encoder's "
                "output are not reserved yet"
            )
        self.neuron_config: NeuronConfig = config.read(vllm_config, kv_cache_config.num_blocks, runs_ahead=runs_ahead)
        # Requests that can never run: they end with an error in the next `update_from_output()`.
        self._unservable: dict[str, Request] = {}
        # Running requests with prompt tokens left, in order of admission.
        self._prefilling: list[Request] = []
        # Running requests whose prompt is as long as the model takes: they emit one token and never decode.
        self._never_decode: list[Request] = []
        # Requests that wait and hold blocks: sessions between two turns, and prompts whose KV comes from elsewhere.
        self._waiting_holders: set[Request] = set()
        # LoRA adapters of running requests.
        self._loras: Counter[int] = Counter()
        self._turns = 0
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        compat.require(self, compat.ATTRIBUTES)
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
        """As the base, but never raises into the engine: a second request under a living id is dropped."""
        known = self.requests.get(request.request_id)
        if known is not None and known.streaming_queue is None:
            logger.error(
                "Request %r is dropped: another request with this id is still alive; that one goes on.",
                request.request_id,
            )
            return
        super().add_request(request)

    def _enqueue_waiting_request(self, request: Request) -> None:
        self._turns += 1
        ticket = getattr(request, "neuron", None)
        if ticket is not None:
            # A session goes on with the blocks that it holds.
            ticket.turn = self._turns
            self._waiting_holders.add(request)
        else:
            try:
                need = self._need(request)
            except ValueError as error:
                logger.warning("Request %r can never run and ends with an error: %s", request.request_id, error)
                self._unservable[request.request_id] = request
                return
            request.neuron = Ticket(need, self._turns)
        super()._enqueue_waiting_request(request)

    def _need(self, request: Request) -> int:
        """KV blocks at worst; ValueError when it can never run."""
        outputs = min(max(0, request.max_tokens), self.max_model_len)
        return self._gate.need(request.num_prompt_tokens, outputs, request.resumable)

    # Admission

    def _admit(self, request: Request) -> None:
        """Counts a request that the base has put among the running; its slot and blocks are reserved already."""
        self._waiting_holders.discard(request)
        if request.lora_request:
            request.neuron.adapter = request.lora_request.lora_int_id
            self._loras[request.neuron.adapter] += 1
        if request.num_prompt_tokens >= self.max_model_len:
            self._never_decode.append(request)
        self._track_prefill(request)

    def _track_prefill(self, request: Request) -> None:
        """Keeps the list of prompts that are part done right after a request's counts have moved."""
        listed = request in self._prefilling
        if self._is_prefill_request(request):
            if not listed:
                self._prefilling.append(request)
        elif listed:
            self._prefilling.remove(request)

    def _is_prefill_request(self, request: Request) -> bool:
        """Whether prompt tokens are left to compute; outputs that are replayed after a preemption count as such."""
        return self._prompt_left(request, request.num_computed_tokens)

    def _prompt_left(self, request: Request, computed: int) -> bool:
        return bool(computed < max(request.num_prompt_tokens, request.num_tokens - 1))

    # Departure

    def _leave_running(self, request: Request) -> None:
        for listed in (self._prefilling, self._never_decode):
            if request in listed:
                listed.remove(request)
        ticket = getattr(request, "neuron", None)
        if ticket is not None and ticket.adapter is not None:
            self._loras[ticket.adapter] -= 1
            self._loras += Counter()  # drops those that came to zero
            ticket.adapter = None

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._unservable.pop(request.request_id, None)
        self._waiting_holders.discard(request)
        self._leave_running(request)
        ticket = getattr(request, "neuron", None)
        if ticket is not None and ticket.row is not None:
            # A connector may keep the blocks for a while; `_free_blocks` tells.
            self._gate.unseat(ticket.row)
        return super()._free_request(request, *args, **kwargs)

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._release(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._leave_running(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        self._waiting_holders.discard(request)
        ticket = getattr(request, "neuron", None)
        if ticket is not None and ticket.row is not None:
            self._gate.leave(ticket.row)
            ticket.row = None

    def _handle_stopped_request(self, request: Request) -> bool:
        finished = bool(super()._handle_stopped_request(request))
        if not finished:
            # A session keeps its slot and its blocks until the next prompt comes.
            self._leave_running(request)
        return finished

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """The next prompt of a session; one that has grown beyond the longest sequence ends with an error."""
        super()._update_request_as_session(session, update)
        if session.num_tokens > self.max_model_len:
            logger.warning(
                "Request %r can never run on and ends with an error: %d tokens: expected at most max_model_len = %d",
                session.request_id,
                session.num_tokens,
                self.max_model_len,
            )
            self._unservable[session.request_id] = session

    def _update_requests_with_invalid_blocks(self, requests: Iterable[Request], *args: Any, **kwargs: Any) -> Any:
        """Blocks whose load failed are computed again: a request that decoded may be back in its prompt."""
        affected = list(requests)
        found = super()._update_requests_with_invalid_blocks(affected, *args, **kwargs)
        for request in affected:
            if request.status == RequestStatus.RUNNING:
                self._track_prefill(request)
        if len(self._prefilling) > 1:
            order = {request: at for at, request in enumerate(self.running)}
            self._prefilling.sort(key=order.__getitem__)
        return found

    # Requests that can never run

    def get_num_unfinished_requests(self) -> int:
        """As the base, with those that are in no queue and still to end with an error."""
        unfinished = int(super().get_num_unfinished_requests())
        if self._pause_state == PauseState.PAUSED_ALL:
            return unfinished
        return unfinished + sum(not hasattr(request, "neuron") for request in self._unservable.values())

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """As the base; then requests that can never run end with an error output."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self._unservable:
            ended = list(self._unservable.values())
            self.finish_requests(list(self._unservable), RequestStatus.FINISHED_ERROR)
            for request in ended:
                of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
                of_client.outputs.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=[],
                        finish_reason=request.get_finished_reason(),
                        events=request.take_events(),
                        trace_headers=request.trace_headers,
                    )
                )
        return outputs
