"""`VllmInputs` under watch: what it fills is compared with what the scheduler's own requests say.

The scheduler is a real one; the tokens are made up here, as a device would sample them.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

import oracle_inputs
from inputs_setup import WatchedInputs
from neuron_sched.vllm.inputs import VllmInputs
from vllm_harness import starts

WAYS = ("list", "call", "accept", "accepted")
"""How a step learns the tokens of steps in flight: from a list, from a callable, from a callable that accepts those
steps, or because they were accepted before."""


@dataclass
class InFlight:
    """A filled step: what it was, and what it sampled."""

    out: Any
    sampled: list[list[int]]
    places: dict[str, int]
    """Positions of the sampled tokens."""
    requests: dict[str, Any]
    """The scheduler's requests, by id."""
    accepted: bool = False


def wishes(params):
    """`top_k`, `top_p`, `temperature` of vLLM's sampling parameters, as the tensors have them."""
    return (params.top_k if params.top_k > 0 else -1, params.top_p, params.temperature)


class Watch:
    """The worker of one scheduler: each `fill` is compared with the oracle, over buffers full of garbage."""

    def __init__(self, sched, *, buffers=1, vocab_size=None, sample=None):
        self.sched = sched
        self.config = sched.neuron_config
        self.inputs = VllmInputs(self.config, buffers=buffers, vocab_size=vocab_size)
        self.watched = WatchedInputs(self.config, buffers=buffers)
        self.watched.inputs = self.inputs
        self.sample = sample or (lambda name, position, number: 3 + (31 * number + 7 * position + len(name)) % 990)
        self.in_flight = deque()
        self.number = 0
        self.batches = []  # copies: the memory is used again

    def step(self, ahead=0, way="call", **options):
        """Schedules, fills, and brings outputs back until `ahead` are in flight; returns the scheduler's output."""
        out = self.sched.schedule()
        self.fill(out, way, **options)
        while len(self.in_flight) > ahead:
            self.deliver()
        return out

    def run(self, ahead=0, way="call", limit=2_000, **options):
        """Steps to the end, and the step that tells of it; the batches, without those of empty steps."""
        for _ in range(limit):
            if not self.sched.requests:
                self.step()
                assert (self.inputs.num_requests, self.inputs.num_in_flight) == (0, 0)
                return self.batches
            self.step(ahead, way, **options)
        raise AssertionError(f"not finished after {limit} steps: {list(self.sched.requests)}")

    def fill(self, out, way="call", context_bucket=None):
        """Fills the output that was just scheduled, the tokens of steps in flight handed over in one of the `WAYS`."""
        if way == "accepted":
            self.accept_all()
        expected, unknown = self.expected(out, context_bucket)
        names = list(out.num_scheduled_tokens)
        if expected is None:
            assert self.inputs.fill(out) is None
            self.in_flight.append(InFlight(out, [], {}, {}))
            return None
        asked = []

        def ask(ids):
            asked.append(ids)
            if way == "accept":
                self.accept_all()
                return [None] * len(ids)
            return [unknown[name] for name in ids]

        tokens = ask
        if way == "list":
            tokens = [unknown.get(name) for name in names] if unknown else None
        batch = self.watched.fill(
            lambda: self.inputs.fill(out, tokens, context_bucket=context_bucket),
            expected,
            ids=names,
            real=sum(out.num_scheduled_tokens.values()),
        )
        assert asked == ([list(unknown)] if unknown and way != "list" else []), "those that are unknown, once"
        assert (batch.num_padded_tokens, batch.kind) == (
            (out.num_seqs_padded, "decode")
            if out.num_seqs_padded
            else (sum(out.num_scheduled_tokens_padded.values()), "prefill")
        )
        self.ran(out, batch)
        return batch

    def ran(self, out, batch):
        """Makes up the tokens of a step; each row of which everything known is computed has one."""
        before, emits = starts(out), []
        sampled, places = [], {}
        for name, count in out.num_scheduled_tokens.items():
            end = before[name] + count
            emits.append(end >= self.sched.requests[name].num_tokens)
            sampled.append([self.sample(name, end, self.number)] if emits[-1] else [])
            if emits[-1]:
                places[name] = end
        assert batch.emits == emits
        self.number += 1
        requests = {name: self.sched.requests[name] for name in out.num_scheduled_tokens}
        self.batches.append(batch.copy())
        self.in_flight.append(InFlight(out, sampled, places, requests))

    def expected(self, out, context_bucket=None):
        """The oracle's tensors, None of an empty step; and the tokens that the worker cannot know, by id."""
        before, rows, unknown = starts(out), [], {}
        kind = "decode" if out.num_seqs_padded else "prefill"
        for name, count in out.num_scheduled_tokens.items():
            request = self.sched.requests[name]
            blocks = list(self.sched.kv_cache_manager.get_block_ids(name)[0])
            top_k, top_p, temperature = wishes(request.sampling_params)
            options = {"top_k": top_k, "top_p": top_p, "temperature": temperature, "request_id": name}
            start, tokens = before[name], list(request.all_token_ids)
            if kind == "prefill":
                rows.append(oracle_inputs.Prefill(tokens[start : start + count], start, blocks, **options))
                continue
            if start < len(tokens):
                token = tokens[start]
            else:
                step = next(step for step in reversed(self.in_flight) if step.places.get(name) == start)
                token = step.sampled[list(step.out.num_scheduled_tokens).index(name)][0]
                if not step.accepted:
                    unknown[name] = token
            rows.append(oracle_inputs.Decode(token, start, blocks, **options))
        if not rows:
            return None, {}
        if kind == "prefill":
            return oracle_inputs.prefill(self.config, rows), {}
        return oracle_inputs.decode(self.config, rows, context_bucket), unknown

    def accept_all(self):
        for step in self.in_flight:
            self.accept(step)

    def accept(self, step):
        if step.out.num_scheduled_tokens and not step.accepted:
            self.inputs.accept(step.sampled)
        step.accepted = True

    def deliver(self, **connector_output):
        """Takes the oldest step in: the worker first, then the scheduler."""
        step = self.in_flight.popleft()
        self.accept(step)
        names = list(step.out.num_scheduled_tokens)
        for name, one in step.requests.items():
            if self.sched.requests.get(name, one) is not one:
                # An engine does not use an id again so soon: vLLM would take the token for one of the new request.
                del step.out.num_scheduled_tokens[name]
        return self.sched.update_from_output(
            step.out,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=step.sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=KVConnectorOutput(**connector_output) if connector_output else None,
            ),
        )
