"""A worker that compares the tensors of `VllmInputs` with an oracle.

The oracle reads the requests of the scheduler. No model runs: a function computes the sampled tokens.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from neuron_sched.vllm.inputs import VllmInputs
from tests.support.oracles import inputs as oracle_inputs
from tests.support.watched_inputs import WatchedInputs
from tests.vllm.support.harness import computed_before

TOKEN_SOURCES = ("list", "call", "accept", "accepted")
"""Ways for `fill` to get the tokens of steps in flight.

A list, a callable that returns them, a callable that calls `accept` for those steps, or `accept` before `fill`.
"""


@dataclass
class InFlight:
    """A filled step and its sampled tokens."""

    out: Any
    sampled: list[list[int]]
    """Sampled tokens of each row: one, or none for a chunk in the middle of a prompt."""
    sampled_positions: dict[str, int]
    """Positions of the sampled tokens, by request id."""
    requests: dict[str, Any]
    """The scheduler's requests, by id."""
    accepted: bool = False
    """Whether `VllmInputs.accept` has received the sampled tokens."""


def sampling_values(params):
    """Return `top_k`, `top_p` and `temperature` of vLLM's sampling parameters as in the tensors."""
    return (params.top_k if params.top_k > 0 else -1, params.top_p, params.temperature)


class CheckedWorker:
    """The worker of a scheduler. Each `fill` overwrites arrays full of garbage and is compared with the oracle.

    `sample(request_id, position, step number)` returns a sampled token.
    """

    def __init__(self, sched, *, buffers=1, vocab_size=None, sample=None):
        self.sched = sched
        self.config = sched.neuron_config
        self.inputs = VllmInputs(self.config, buffers=buffers, vocab_size=vocab_size)
        self.watched = WatchedInputs(self.config, buffers=buffers)
        self.watched.inputs = self.inputs
        self.sample = sample or (lambda name, position, number: 3 + (31 * number + 7 * position + len(name)) % 990)
        self.in_flight = deque()
        self.number = 0
        self.batches = []  # copies, because later fills overwrite the arrays

    def step(self, ahead=0, token_source="call", **options):
        """Schedule and fill a step, then deliver outputs until `ahead` are in flight. Return the scheduler's output."""
        out = self.sched.schedule()
        self.fill(out, token_source, **options)
        while len(self.in_flight) > ahead:
            self.deliver()
        return out

    def run(self, ahead=0, token_source="call", limit=2_000, **options):
        """Run until all requests have finished, and one more step that reports it. Return the batches of all steps."""
        for _ in range(limit):
            if not self.sched.requests:
                self.step()
                assert (self.inputs.num_requests, self.inputs.num_in_flight) == (0, 0)
                return self.batches
            self.step(ahead, token_source, **options)
        raise AssertionError(f"not finished after {limit} steps: {list(self.sched.requests)}")

    def fill(self, out, token_source="call", context_bucket=None):
        """Fill the output that was just scheduled. `token_source` is one of `TOKEN_SOURCES`."""
        if token_source == "accepted":
            self.accept_all()
        expected, unknown = self.expected(out, context_bucket)
        names = list(out.num_scheduled_tokens)
        if expected is None:
            assert self.inputs.fill(out) is None
            self.in_flight.append(InFlight(out, [], {}, {}))
            return None
        requested = []

        def ask(ids):
            requested.append(ids)
            if token_source == "accept":
                self.accept_all()
                return [None] * len(ids)
            return [unknown[name] for name in ids]

        tokens = ask
        if token_source == "list":
            tokens = [unknown.get(name) for name in names] if unknown else None
        batch = self.watched.fill(
            lambda: self.inputs.fill(out, tokens, context_bucket=context_bucket),
            expected,
            ids=names,
            unpadded=sum(out.num_scheduled_tokens.values()),
        )
        assert requested == ([list(unknown)] if unknown and token_source != "list" else []), (
            "fill() asks once, for the rows whose token is unknown"
        )
        assert (batch.num_padded_tokens, batch.kind) == (
            (out.num_seqs_padded, "decode")
            if out.num_seqs_padded
            else (sum(out.num_scheduled_tokens_padded.values()), "prefill")
        )
        self.record_sampled(out, batch)
        return batch

    def record_sampled(self, out, batch):
        """Record a step in flight, with a sampled token for each row whose known tokens are then all computed."""
        before, emits = computed_before(out), []
        sampled, sampled_positions = [], {}
        for name, count in out.num_scheduled_tokens.items():
            end = before[name] + count
            emits.append(end >= self.sched.requests[name].num_tokens)
            sampled.append([self.sample(name, end, self.number)] if emits[-1] else [])
            if emits[-1]:
                sampled_positions[name] = end
        assert batch.emits == emits
        self.number += 1
        requests = {name: self.sched.requests[name] for name in out.num_scheduled_tokens}
        self.batches.append(batch.copy())
        self.in_flight.append(InFlight(out, sampled, sampled_positions, requests))

    def expected(self, out, context_bucket=None):
        """Return the oracle's tensors, `None` for an empty step, and the tokens that `fill` must ask for, by id."""
        before, rows, unknown = computed_before(out), [], {}
        kind = "decode" if out.num_seqs_padded else "prefill"
        for name, count in out.num_scheduled_tokens.items():
            request = self.sched.requests[name]
            blocks = list(self.sched.kv_cache_manager.get_block_ids(name)[0])
            top_k, top_p, temperature = sampling_values(request.sampling_params)
            options = {"top_k": top_k, "top_p": top_p, "temperature": temperature, "request_id": name}
            start, tokens = before[name], list(request.all_token_ids)
            if kind == "prefill":
                rows.append(oracle_inputs.Prefill(tokens[start : start + count], start, blocks, **options))
                continue
            if start < len(tokens):
                token = tokens[start]
            else:
                step = next(step for step in reversed(self.in_flight) if step.sampled_positions.get(name) == start)
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
        """Deliver the oldest step in flight to the worker and then to the scheduler."""
        step = self.in_flight.popleft()
        self.accept(step)
        names = list(step.out.num_scheduled_tokens)
        for name, request in step.requests.items():
            if self.sched.requests.get(name, request) is not request:
                # The id belongs to a new request, and vLLM would append the token of the old one to it.
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
