"""`NeuronScheduler` and `NeuronAsyncScheduler`: vLLM's schedulers for hardware that runs compiled shapes only.

The base keeps queues, KV blocks, connectors and statistics. These classes choose what it sees in each call, one
phase only, and put everything back. What they choose is decided by the core, `neuron_sched._native.Gate`.
"""

from __future__ import annotations

import enum
import itertools
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from neuron_sched.vllm import compat
from neuron_sched.vllm.admission import AdmittingScheduler
from neuron_sched.vllm.buckets import get_bucket_for_count, get_default_num_batched_tokens_buckets
from neuron_sched.vllm.compat import logger
from neuron_sched.vllm.heads import Heads
from neuron_sched.vllm.view import View
from neuron_sched.vllm.watchdog import Watchdog

__all__ = [
    "NeuronAsyncScheduler",
    "NeuronScheduler",
    "SchedulerState",
    "get_bucket_for_count",
    "get_default_num_batched_tokens_buckets",
]


class SchedulerState(enum.Enum):
    """Idle when nobody waits and nobody runs, else what the last step that ran did."""

    IDLE = enum.auto()
    ACTIVE_PREFILL = enum.auto()
    ACTIVE_DECODE = enum.auto()

    def __str__(self) -> str:
        return self.name


class NeuronScheduler(AdmittingScheduler):
    """vLLM's scheduler with steps that are all prefill or all decode, padded to compiled sizes.

    Takes the arguments of vLLM's; settings of its own come from `additional_config["neuron_config"]`. ValueError when
    the configuration cannot work, naming each field, its value and what is expected.

    The output of `schedule()` has two attributes more: `num_scheduled_tokens_padded`, {id: padded tokens}, which add
    up to the token bucket of a prefill and are the real counts of a decode; and `num_seqs_padded`, the batch bucket
    of a decode in rows (0 otherwise).
    """

    prefill_capacity_bound: bool

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.max_num_seqs: int = self.neuron_config.max_num_seqs
        self.max_prefills_per_batch: int = self.neuron_config.max_prefills_per_batch
        self.num_batched_tokens_buckets: list[int] = self.neuron_config.num_batched_tokens_buckets
        self.num_seqs_buckets: list[int] = self.neuron_config.num_seqs_buckets
        self.total_scheduled_tokens = 0
        """Prompt tokens scheduled so far."""
        self.total_padding_tokens = 0
        """Padding scheduled beside them."""
        self._state = SchedulerState.IDLE
        self._watchdog = Watchdog()
        self._num_hidden = 0
        # Of a pass that placed nobody: what it told, for the pass that follows in the same call to tell again.
        self._untold: SchedulerOutput | None = None
        self._untold_blocks: Any = None
        self._defers_connectors = False
        logger.info(
            "Initialized %s on vLLM %s: prefill buckets %s tokens, decode buckets %s rows, KV cache of %d usable "
            "blocks (%d requests of max_model_len %d at once, kv_admission '%s').",
            type(self).__name__,
            compat.release(),
            self.num_batched_tokens_buckets,
            self.num_seqs_buckets,
            self._gate.usable,
            self._gate.usable // self._gate.longest,
            self.max_model_len,
            self.neuron_config.kv_admission,
        )

        if self._gate.longest > self._gate.usable:
            tokens = self._gate.usable * self.neuron_config.block_size
            logger.warning(
                "max_model_len %d is more than the %d tokens that the KV cache holds: requests that could grow beyond "
                "it end with an error, one by one.",
                self.max_model_len,
                tokens,
            )

    @property
    def state(self) -> SchedulerState:
        """Idle when nobody waits and nobody runs, else what the last step did that scheduled something."""
        return self._state

    @property
    def empty_steps(self) -> int:
        """Steps with work but no scheduled token, all in all."""
        return self._watchdog.empty_steps

    # The step

    def schedule(self, throttle_prefills: bool = False, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plans one step: all prefill, or all decode, or nothing."""
        self._begin()
        saturated = self.prefill_capacity_bound
        try:
            output, prefill, throttled = self._plan(throttle_prefills, *args, **kwargs)
        except BaseException:
            # Whoever was chosen before something failed goes back to his place.
            self._settle()
            raise
        # vLLM's exception to throttling: a rank that could prefill and has not drained its queue is not throttled.
        paused = self._pause_state == PauseState.PAUSED_ALL
        self.prefill_capacity_bound = saturated if throttled or paused else self._ready_left()
        self._finish(output, prefill)
        return output

    def _plan(self, throttle_prefills: bool, *args: Any, **kwargs: Any) -> tuple[SchedulerOutput, bool, bool]:
        """The step, whether it was planned as a prefill, and whether prefills were held back."""
        paused = self._pause_state == PauseState.PAUSED_ALL
        # With all slots taken only holders can start: in a decode step nobody else is asked whether he is ready.
        full = self.at_capacity and not self._waiting_holders and not self._prefilling
        head = None if paused or full else self._next_candidate()
        decode_ready = not paused and self._gate.decode_ready(self.running, self.current_step + 1)
        admissible = head is not None and self.can_schedule(head)
        joining = head if head is not None and admissible and self._joins_decode(head) else None
        throttled = decode_ready and compat.throttled(self, throttle_prefills)
        prefill_wanted = not paused and (self.has_prefill_in_running or (admissible and joining is None))
        kind, interleaved = self._gate.decide(prefill_wanted, decode_ready or joining is not None, throttled)
        if kind == "prefill":
            output = self._prefill_pass(head, decode_ready, *args, **kwargs)
            if output.total_num_scheduled_tokens or not decode_ready:
                return output, True, throttled
            # The base could not place anybody: those that decode must not wait for that.
        elif head is not None and joining is None:
            self._left = (head, self._reason(head) or ("interleave" if interleaved else "throttled"))
        output = self._decode_pass(joining, throttle_prefills, *args, **kwargs)
        return output, False, throttled

    def _call_base_schedule(self, throttle_prefills: bool = False, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's own `schedule()`; for the async class that of vLLM's async scheduler."""
        return super().schedule(throttle_prefills, *args, **kwargs)

    def _prefill_pass(self, head: Request | None, decode_ready: bool, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Shows the base prompts only: those that are part done, or else heads of the queue."""
        requests = self._num_requests()
        heads: Heads | None = None
        visible: list[Request] = []
        if self._prefilling:
            for request in self._prefilling:
                if not self._gate.pack(self._rest(request), requests):
                    break
                visible.append(request)
            first = visible[0]
            self._left = None if head is None else (head, "prefill_in_progress")
        else:
            assert head is not None, "a prefill step has a prompt"
            first = head
            self._choose(head)
            while self._choose_next() is not None:
                pass
            heads = self._heads(self._choose_next)
        others: list[tuple[Any, str, Any]] = []
        budget = self._gate.budget(self._rest(first), requests)
        if budget < self.max_num_scheduled_tokens:
            others.append((self, "max_num_scheduled_tokens", budget))
        if requests == 1 and compat.caps_alone(self):
            others.append((self.scheduler_config, "long_prefill_token_threshold", 0))
        if any(request.num_tokens >= self.max_model_len for request in visible):
            # The base keeps the last position for an output and would never give the last prompt token its turn.
            others.append((self, "max_model_len", self.max_model_len + 1))
        others += compat.without_padding_drafts(self)
        if decode_ready:
            others += [(self, name, connector) for name, connector in compat.deferring(self)]
        scheduled_before = set(self.prev_step_scheduled_req_ids) if decode_ready else set()
        # The step was chosen with regard to throttling; the base is not to ask itself again.
        output = self._pass(View(self, visible, heads, others), decode_ready, False, *args, **kwargs)
        if decode_ready and not output.total_num_scheduled_tokens:
            compat.same_step(self, scheduled_before)
            compat.give_back_ids(self, output)
            self._tell(output)
            self._untold = output
        return output

    def _decode_pass(self, joining: Request | None, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Shows the base those that decode, and of those who wait only one who joins them."""
        visible: list[Request] | None = None
        heads: Heads | None = None
        if self._prefilling or self._never_decode:
            hidden = {*self._prefilling, *self._never_decode}
            # There may be many that decode: no loop in Python.
            visible = list(itertools.filterfalse(hidden.__contains__, self.running))
        if joining is not None:
            self._choose(joining)
            heads = self._heads(lambda: None)
        return self._pass(View(self, visible, heads, []), False, *args, **kwargs)

    def _tell(self, output: SchedulerOutput) -> None:
        """Adds what an earlier pass has told, whose output nobody got."""
        if self._untold is not None:
            compat.tell_again(self._untold, output)
            self._untold = None

    def _pass(self, view: View, defers_connectors: bool, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """One call of the base; whatever it does, everything is put back and everybody is in one place."""
        self._defers_connectors = defers_connectors
        self._num_hidden = view.num_hidden
        try:
            with view:
                return self._call_base_schedule(*args, **kwargs)
        finally:
            self._defers_connectors = False
            self._num_hidden = 0
            self._settle(view.newcomers, view.returned)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting), whatever is hidden at the moment."""
        running, waiting = super().get_request_counts()
        return running + self._num_hidden, waiting

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> Any:
        """As the base, but once a step: not for a pass that places nobody while a decode pass follows."""
        blocks = getattr(scheduler_output, "kv_connector_block_state", None)
        if self._defers_connectors and not scheduler_output.total_num_scheduled_tokens:
            self._untold_blocks = blocks
            return None
        if self._untold_blocks is not None:
            scheduler_output.kv_connector_block_state = compat.join_block_state(self._untold_blocks, blocks)
            self._untold_blocks = None
        return super()._build_kv_connector_meta(connector, scheduler_output)

    # The output

    def _finish(self, output: SchedulerOutput, prefill: bool) -> None:
        """Pads, checks and counts a step that the base has planned."""
        self._tell(output)
        counts = self._last_step = output.num_scheduled_tokens
        output.num_scheduled_tokens_padded, output.num_seqs_padded = {}, 0
        if counts:
            prefill = self._pad(output, prefill)
            self._gate.ran(prefill)
            self._state = SchedulerState.ACTIVE_PREFILL if prefill else SchedulerState.ACTIVE_DECODE
        self._num_in_flight += 1
        self._idle_if_empty()
        self._attach_grammar(output)
        self._watchdog.saw(bool(counts), self.has_unfinished_requests(), self.explain)

    def _pad(self, output: SchedulerOutput, prefill: bool) -> bool:
        """Checks a step and attaches its padded counts; answers whether it is a prefill step."""
        counts = output.num_scheduled_tokens
        rows = self._prefill_rows(output) if prefill else []
        if not any(is_prefill for _, is_prefill, _ in rows):
            # A prefill step whose prompts were computed elsewhere but for their last tokens is a decode step.
            prefilling = [request.request_id for request in self._prefilling]
            output.num_scheduled_tokens_padded, output.num_seqs_padded = self._gate.pad_decode(counts, prefilling)
            return False
        output.num_scheduled_tokens_padded, bucket = self._gate.pad_prefill(rows)
        total = output.total_num_scheduled_tokens
        self.total_scheduled_tokens += total
        self.total_padding_tokens += bucket - total
        return True

    def _prefill_rows(self, output: SchedulerOutput) -> list[tuple[str, bool, int]]:
        """(id, whether it had prompt tokens left before the step, count) of each row."""
        cached = output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        started = {new.req_id for new in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        rows = []
        for request_id, count in output.num_scheduled_tokens.items():
            request, computed = self.requests.get(request_id), before.get(request_id, -1)
            prompt_left = request is not None and computed >= 0 and self._prompt_left(request, computed)
            if prompt_left and request_id in started and self._is_remote(request):
                # It may have come with all but its last token, which then counts as a decode.
                prompt_left = computed != request.num_tokens - 1
            rows.append((request_id, prompt_left, count))
        return rows

    def _calculate_padded_count(self, token_count: int) -> int:
        """The smallest token bucket that holds a count; 0 for 0. ValueError beyond the last bucket."""
        return get_bucket_for_count(token_count, self.num_batched_tokens_buckets)

    def _attach_grammar(self, output: SchedulerOutput) -> None:
        """Attaches the grammar bitmask, for a runner that samples within its step.

        Where tokens of a step in flight are needed first, only the engine's later call has the right one.
        """
        output._grammar_bitmask = output._structured_output_request_ids = None
        compiled = self.structured_output_manager.backend is not None
        if compiled and output.has_structured_output_requests and not output.pending_structured_output_tokens:
            grammar = self.get_grammar_bitmask(output)
            if grammar is not None:
                # The manager fills the same array again for the engine's own call.
                output._grammar_bitmask = grammar.grammar_bitmask.copy()
                output._structured_output_request_ids = list(grammar.structured_output_request_ids)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """As vLLM's; requests that can never run end here, with an error output."""
        self._num_in_flight = max(0, self._num_in_flight - 1)
        if not self._num_in_flight:
            self._left = None
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self._idle_if_empty()
        return outputs

    def _idle_if_empty(self) -> None:
        if not self.running and not any(self._queues()):
            self._state = SchedulerState.IDLE

    def check(self) -> None:
        """Compares what the core was told with the base's queues; RuntimeError tells of a fault of these classes.

        For tests and for the debugger: it walks all queues.
        """
        waiting = [request for queue in self._queues() for request in queue]
        unqueued = [request for request in self._unservable.values() if not hasattr(request, "neuron")]
        placed = [*self.running, *waiting, *unqueued]
        holders = [request for request in (*self.running, *waiting) if request.neuron.row is not None]
        sessions = [request for request in holders if request.resumable and request not in set(self.running)]
        delayed = [request for request in self.requests.values() if request.is_finished()]
        reserved = sum(request.neuron.need for request in (*holders, *delayed) if request.neuron.row is not None)
        prefilling = [request for request in self.running if self._is_prefill_request(request)]
        laws = {
            "everybody is in one place": len({id(request) for request in placed}) == len(placed),
            "everybody alive is in a place": len(placed) + len(delayed) == len(self.requests),
            "who runs holds blocks": all(request.neuron.row is not None for request in self.running),
            "slots are those of the running and of sessions": self._gate.seated == len(self.running) + len(sessions),
            "promised blocks are those of the holders": self._gate.reserved == reserved,
            "prompts that are part done are known": prefilling == self._prefilling,
            "nothing is hidden": self._set_aside is None and not self._num_hidden and not self._chosen,
        }
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise RuntimeError(f"neuron-sched: broken: {'; '.join(broken)}")


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):
    """`NeuronScheduler` for an engine that schedules a step while another is in flight, as vLLM does by default."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if not self.num_spec_tokens:
            return
        # Near the longest sequence the base would cut the drafts to widths that nothing was compiled for. Once
        # without drafts always without: a rejected draft must not bring a request back below the limit.
        last = self.max_model_len - 3 - 2 * self.num_spec_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                ticket = request.neuron
                ticket.drafts = ticket.drafts and request.num_computed_tokens <= last
                self._drop_drafts(request)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """As vLLM's, for an engine that runs one step after the other; no drafts for those that are to have none."""
        super().update_draft_token_ids(draft_token_ids)
        for request_id in draft_token_ids.req_ids:
            self._drop_drafts(self.requests.get(request_id))

    def _drop_drafts(self, request: Request | None) -> None:
        if request is not None and not request.neuron.drafts:
            request.spec_token_ids = []
