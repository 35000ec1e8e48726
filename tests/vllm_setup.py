"""What the tests of the vLLM classes share: builders, an engine's loop with outputs in flight, and what vLLM said.

A scheduler is driven either one step at a time (the output of a step is known before the next one is scheduled) or one
step ahead, as an engine with a batch queue of two does: a step is scheduled before the output of the one before it.
"""

import functools
import logging
from collections import defaultdict

import pytest
import vllm
from vllm.config import KVTransferConfig, LoRAConfig, SpeculativeConfig
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

import vllm_harness
from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import request, starts

LIMITS = ("max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens")
RELEASE = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])

# Most rules hold for both classes alike, and the async one under a one-step engine takes the very same steps.
both_classes = pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler], ids=["sync", "async"])
# The same with the async class one step ahead: for what must come out equal although outputs are known later.
every_engine = pytest.mark.parametrize(
    ("cls", "ahead"),
    [(NeuronScheduler, 0), (NeuronAsyncScheduler, 0), (NeuronAsyncScheduler, 1)],
    ids=["sync", "async-one-step", "async-ahead"],
)


def since(major, minor, what):
    """Skips a test on releases that cannot do `what`."""
    return pytest.mark.skipif(
        (major, minor) > RELEASE, reason=f"vLLM {vllm.__version__} has no {what} (since {major}.{minor})"
    )


def prepared(cls, edit):
    """`cls` over a vllm_config that `edit` has changed after vLLM checked it, as a platform's hook does."""

    def construct(*, vllm_config, **rest):
        edit(vllm_config)
        return cls(vllm_config=vllm_config, **rest)

    return construct


def build(cls=NeuronScheduler, *, edit=None, **config):
    """A roomy scheduler with blocks of 16 tokens, as the cases have it, with what they change."""
    roomy = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 400}
    chosen = cls if edit is None else prepared(cls, edit)
    sched = vllm_harness.build(chosen, **{**roomy, **config})
    sched.structured_output_manager.backend = FakeBackend()
    return sched


def build_ahead(cls, ahead, **config):
    """For an engine with `ahead` outputs in flight; that it runs ahead is told to the scheduler, as a server does."""
    return build(cls, async_scheduling=bool(ahead), **config)


def with_connector(cls, *, failed_load="recompute", **config):
    """A scheduler with a `FakeConnector`, found at `scheduler.connector`."""

    def edit(vllm_config):
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="FakeConnector",
            kv_connector_module_path="vllm_connector",
            kv_role="kv_both",
            kv_load_failure_policy=failed_load,
        )

    return build(cls, edit=edit, **config)


def with_lora(cls, max_loras=1, **config):
    def edit(vllm_config):
        vllm_config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=max_loras, max_cpu_loras=8)

    return build(cls, edit=edit, **config)


def lora(req, number):
    req.lora_request = LoRARequest(f"adapter-{number}", number, f"/adapters/{number}")
    return req


def add(sched, **requests):
    """add(s, a=(6, 4)): request "a" with a prompt of 6 tokens and 4 outputs."""
    for name, (prompt_len, max_tokens, *rest) in requests.items():
        sched.add_request(request(name, prompt_len, max_tokens, **(rest[0] if rest else {})))


def usable_free(sched):
    return sched.kv_cache_manager.block_pool.get_num_free_blocks()


def names(requests):
    return [r.request_id for r in requests]


def queued(sched):
    """Ids of everybody who waits, whatever queue the release keeps them in."""
    queues = (getattr(sched, name, ()) for name in ("waiting", "skipped_waiting", "kv_holding_waiting"))
    return [r.request_id for queue in queues for r in queue]


def finish(sched, out, token=7, **connector_output):
    """update_from_output() with one made-up token for each request all of whose known tokens this step computes."""
    ids, before = list(out.num_scheduled_tokens), starts(out)
    sampled = []
    for rid in ids:
        r = sched.requests.get(rid)
        done = r is not None and before[rid] + out.num_scheduled_tokens[rid] >= r.num_tokens
        sampled.append([token] if done else [])
    return sched.update_from_output(
        out,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(**connector_output) if connector_output else None,
        ),
    )


class Engine:
    """The loop of vLLM's engine core around a scheduler, with `ahead` outputs in flight, keeping what came out."""

    def __init__(self, sched, ahead=0):
        self.sched = sched
        self.ahead = ahead
        self.in_flight = []
        self.outs = []  # every SchedulerOutput, empty ones too
        self.kinds = []  # "P128" or "D" of each step that scheduled something
        self.remote = set()  # requests whose prompt another node has computed
        self.may_preempt = False
        self.emitted = defaultdict(list)  # id: tokens
        self.finished = {}  # id: finish reason
        self.finished_at = {}  # id: number of the step whose output it was
        self.errors = []  # ids that ended with an error, in order
        self.clients = {}  # id: client that got its outputs
        self.stats = []  # SchedulerStats

    def schedule(self, *args, **kwargs):
        running, limits = self.sched.running, self.limits()
        out = self.sched.schedule(*args, **kwargs)
        kind = phase(self.sched, out, self.remote)
        check_padding(self.sched, out, kind)
        assert not out.preempted_req_ids or self.may_preempt, out.preempted_req_ids
        assert self.sched.running is running
        assert self.limits() == limits
        assert len(running) <= limits["max_num_running_reqs"]
        if kind:
            self.kinds.append(kind)
        self.in_flight.append((len(self.outs), out))
        self.outs.append(out)
        return out

    def limits(self):
        """What a step may lower for the time of a call."""
        found = {name: getattr(self.sched, name, None) for name in LIMITS}
        return {**found, "threshold": self.sched.scheduler_config.long_prefill_token_threshold}

    def settle(self, keep=None, **connector_output):
        """Processes outputs until only `keep` are in flight."""
        keep = self.ahead if keep is None else keep
        while len(self.in_flight) > keep:
            number, out = self.in_flight.pop(0)
            for client, outputs in finish(self.sched, out, **connector_output).items():
                if outputs.scheduler_stats is not None:
                    self.stats.append(outputs.scheduler_stats)
                for one in outputs.outputs:
                    self.emitted[one.request_id] += one.new_token_ids
                    self.clients[one.request_id] = client
                    if one.finish_reason is not None:
                        self.finished[one.request_id] = str(one.finish_reason)
                        self.finished_at[one.request_id] = number
                        if str(one.finish_reason) == "error":
                            self.errors.append(one.request_id)
            connector_output = {}

    def step(self, *args, received=None, **kwargs):
        out = self.schedule(*args, **kwargs)
        self.settle(**({"finished_recving": set(received)} if received else {}))
        self.sched.check()
        return out

    def run(self, arrivals=None, limit=2_000, before=None):
        """Steps until nothing is left; `arrivals` = {step number: [requests]}. Returns self.

        `before(t)` is called before step `t`. An engine schedules while the scheduler has requests or while outputs
        are in flight.
        """
        arrivals = dict(arrivals or {})
        start = len(self.outs)
        for t in range(limit):
            for r in arrivals.pop(t, []):
                self.sched.add_request(r)
            if before is not None:
                before(t)
            if not arrivals and not self.sched.requests and not self.sched.has_requests():
                self.settle(keep=0)
                return self
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {self.steps[start:][-5:]} {list(self.sched.requests)}")

    @property
    def steps(self):
        """{id: tokens} of each step that scheduled something."""
        return [dict(out.num_scheduled_tokens) for out in self.outs if out.num_scheduled_tokens]

    @property
    def padded(self):
        """{id: padded tokens} of each step that scheduled something."""
        return [dict(out.num_scheduled_tokens_padded) for out in self.outs if out.num_scheduled_tokens]

    @property
    def outputs(self):
        return {rid: len(tokens) for rid, tokens in self.emitted.items()}


def phase(sched, out, remote=()):
    """ "P128" (a prefill step of 128 tokens), "D" or "" as the requests themselves tell it, right after `schedule()`.

    The last token of a prompt whose rest came from another node is a decode; such requests are given as `remote`.
    """
    before = starts(out)
    prefills = set()
    for rid, count in out.num_scheduled_tokens.items():
        r = sched.requests[rid]
        assert count > 0, (rid, count)
        if before[rid] < max(r.num_prompt_tokens, r.num_tokens - 1) and rid not in remote:
            prefills.add(rid)
    assert prefills in (set(), set(out.num_scheduled_tokens)), f"mixed: {out.num_scheduled_tokens}, {prefills} prefill"
    if not out.num_scheduled_tokens:
        return ""
    return f"P{sum(out.num_scheduled_tokens.values())}" if prefills else "D"


def check_padding(sched, out, kind):
    real, padded = out.num_scheduled_tokens, out.num_scheduled_tokens_padded
    assert list(padded) == list(real)
    assert padded is not real
    if kind.startswith("P"):
        *full, last = real
        assert {rid: padded[rid] for rid in full} == {rid: real[rid] for rid in full}, "the last row has the padding"
        fitting = min(b for b in sched.num_batched_tokens_buckets if b >= sum(real.values()))
        assert (sum(padded.values()), padded[last] >= real[last]) == (fitting, True)
        assert out.num_seqs_padded == 0
    else:
        assert padded == real
        assert out.num_seqs_padded == (min(b for b in sched.num_seqs_buckets if b >= len(real)) if real else 0)


class Logged(logging.Handler):
    """`with Logged() as log:` keeps what this package logs, whatever level the environment has chosen for vLLM."""

    def __init__(self):
        super().__init__(level=logging.DEBUG)
        self.records = []
        self.loggers = {one: one.level for one in map(logging.getLogger, ("vllm", "neuron_sched"))}

    def emit(self, record):
        if "neuron_sched" in record.name or "neuron_sched" in record.pathname:
            self.records.append((record.levelno, record.getMessage()))

    def __enter__(self):
        for one in self.loggers:
            one.addHandler(self)
            one.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_):
        for one, level in self.loggers.items():
            one.removeHandler(self)
            one.setLevel(level)

    def of(self, level):
        return [text for found, text in self.records if found == level]

    @property
    def infos(self):
        return self.of(logging.INFO)

    @property
    def warnings(self):
        return self.of(logging.WARNING)

    @property
    def errors(self):
        return self.of(logging.ERROR)


class FakeGrammar(StructuredOutputGrammar):
    """A grammar that takes every token; its mask of allowed tokens is one number."""

    def __init__(self, mask=1):
        self.mask = mask

    def accept_tokens(self, request_id, tokens):
        return True

    def validate_tokens(self, tokens):
        return tokens

    def rollback(self, num_tokens):
        pass

    def fill_bitmask(self, bitmask, batch_index):
        bitmask[batch_index].fill_(self.mask)

    def is_terminated(self):
        return False

    def reset(self):
        pass


class FakeBackend:
    """Memory for the masks of a batch."""

    def allocate_token_bitmask(self, max_num_seqs):
        import torch

        return torch.zeros((max_num_seqs, 2), dtype=torch.int32)

    def destroy(self):
        pass


def compiled(req, grammar=None):
    """Says that the grammar of a waiting request is ready."""
    req.structured_output_request.grammar = grammar or FakeGrammar()
    return req


def raising_once(function, error, call=1):
    """`function`, whose call number `call` raises; `.calls` counts."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        if wrapper.calls == call:
            raise error
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


DRAFTS = 3


def drafting(vllm_config):
    vllm_config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=DRAFTS,
        prompt_lookup_max=4,
        prompt_lookup_min=2,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )


def accepted(sched, out, count):
    """The runner's answer: `count(id, drafts)` tokens for every request whose prompt is done."""
    ids, before = list(out.num_scheduled_tokens), starts(out)
    tokens = []
    for rid in ids:
        r = sched.requests.get(rid)
        prefilling = r is not None and before[rid] + out.num_scheduled_tokens[rid] < r.num_prompt_tokens
        drafts = len(out.scheduled_spec_decode_tokens.get(rid, ()))
        tokens.append([] if r is None or prefilling else [7] * count(rid, drafts))
    return sched.update_from_output(
        out,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
