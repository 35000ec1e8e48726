"""The loop of vLLM's engine core around a scheduler.

The loop either processes the output of a step before it schedules the next one, or runs one step ahead, as an engine
with a batch queue of two does: it then schedules a step while the previous one is in flight.
"""

from collections import defaultdict

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.vllm.support.harness import computed_before

LIMITS = ("max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens")


def finish(sched, out, token=7, **connector_output):
    """Call `update_from_output()` with one sampled token for each request whose known tokens are then all computed."""
    ids, before = list(out.num_scheduled_tokens), computed_before(out)
    sampled = []
    for rid in ids:
        r = sched.requests.get(rid)
        samples = r is not None and before[rid] + out.num_scheduled_tokens[rid] >= r.num_tokens
        sampled.append([token] if samples else [])
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
    """An engine loop that runs `ahead` steps ahead, checks every output and records the results."""

    def __init__(self, sched, ahead=0):
        self.sched = sched
        self.ahead = ahead
        self.in_flight = []
        self.outs = []  # every SchedulerOutput, including those of empty steps
        self.kinds = []  # "P128" or "D" for each step that is not empty
        self.remote_prefills = set()  # ids of requests whose prompt another node has computed
        self.allow_preemption = False
        self.emitted = defaultdict(list)  # sampled tokens by request id
        self.finished = {}  # finish reason by request id
        self.finished_at = {}  # by request id, the number of the step in whose output the request finished
        self.errors = []  # ids of the requests that finished with an error, in order
        self.clients = {}  # by request id, the client that received the outputs
        self.stats = []  # SchedulerStats of each output that has them

    def schedule(self, *args, **kwargs):
        running, limits = self.sched.running, self.limits()
        out = self.sched.schedule(*args, **kwargs)
        kind = step_kind(self.sched, out, self.remote_prefills)
        check_padding(self.sched, out, kind)
        assert not out.preempted_req_ids or self.allow_preemption, out.preempted_req_ids
        assert self.sched.running is running
        assert self.limits() == limits
        assert len(running) <= limits["max_num_running_reqs"]
        if kind:
            self.kinds.append(kind)
        self.in_flight.append((len(self.outs), out))
        self.outs.append(out)
        return out

    def limits(self):
        """Return the limits that a step may change while it calls the base class."""
        found = {name: getattr(self.sched, name, None) for name in LIMITS}
        return {**found, "threshold": self.sched.scheduler_config.long_prefill_token_threshold}

    def process_outputs(self, keep=None, **connector_output):
        """Process outputs until only `keep`, by default `ahead`, are in flight."""
        keep = self.ahead if keep is None else keep
        while len(self.in_flight) > keep:
            number, out = self.in_flight.pop(0)
            for client, outputs in finish(self.sched, out, **connector_output).items():
                if outputs.scheduler_stats is not None:
                    self.stats.append(outputs.scheduler_stats)
                for output in outputs.outputs:
                    self.emitted[output.request_id] += output.new_token_ids
                    self.clients[output.request_id] = client
                    if output.finish_reason is not None:
                        self.finished[output.request_id] = str(output.finish_reason)
                        self.finished_at[output.request_id] = number
                        if str(output.finish_reason) == "error":
                            self.errors.append(output.request_id)
            connector_output = {}

    def step(self, *args, received=None, **kwargs):
        out = self.schedule(*args, **kwargs)
        self.process_outputs(**({"finished_recving": set(received)} if received else {}))
        self.sched.check()
        return out

    def run(self, arrivals=None, limit=2_000, before=None):
        """Run steps until all requests have finished. Return the engine.

        `arrivals` maps a step number to the requests added before that step. `before(t)` is called before step `t`.
        """
        arrivals = dict(arrivals or {})
        start = len(self.outs)
        for t in range(limit):
            for r in arrivals.pop(t, []):
                self.sched.add_request(r)
            if before is not None:
                before(t)
            if not arrivals and not self.sched.requests and not self.sched.has_requests():
                self.process_outputs(keep=0)
                return self
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {self.steps[start:][-5:]} {list(self.sched.requests)}")

    @property
    def steps(self):
        """Scheduled tokens by request id, for each step that is not empty."""
        return [dict(out.num_scheduled_tokens) for out in self.outs if out.num_scheduled_tokens]

    @property
    def padded(self):
        """Padded tokens by request id, for each step that is not empty."""
        return [dict(out.num_scheduled_tokens_padded) for out in self.outs if out.num_scheduled_tokens]

    @property
    def outputs(self):
        """Number of output tokens by request id."""
        return {rid: len(tokens) for rid, tokens in self.emitted.items()}


def step_kind(sched, out, remote=()):
    """Return "P128" for a prefill step of 128 tokens, "D" for a decode step, or "" for an empty step.

    Call it right after `schedule()`: it compares the counts with the requests. `remote` has the ids of requests whose
    prompt another node has computed except for its last token, which counts as a decode.
    """
    before = computed_before(out)
    prefills = set()
    for rid, count in out.num_scheduled_tokens.items():
        r = sched.requests[rid]
        assert count > 0, (rid, count)
        if before[rid] < max(r.num_prompt_tokens, r.num_tokens - 1) and rid not in remote:
            prefills.add(rid)
    assert prefills in (set(), set(out.num_scheduled_tokens)), f"mixed step: {out.num_scheduled_tokens}: {prefills}"
    if not out.num_scheduled_tokens:
        return ""
    return f"P{sum(out.num_scheduled_tokens.values())}" if prefills else "D"


def check_padding(sched, out, kind):
    """Assert that a step of this kind is padded to the smallest bucket that holds it."""
    unpadded, padded = out.num_scheduled_tokens, out.num_scheduled_tokens_padded
    assert list(padded) == list(unpadded)
    assert padded is not unpadded
    if kind.startswith("P"):
        *full, last = unpadded
        assert {rid: padded[rid] for rid in full} == {rid: unpadded[rid] for rid in full}, "only the last row is padded"
        bucket = min(b for b in sched.num_batched_tokens_buckets if b >= sum(unpadded.values()))
        assert (sum(padded.values()), padded[last] >= unpadded[last]) == (bucket, True)
        assert out.num_seqs_padded == 0
    else:
        assert padded == unpadded
        assert out.num_seqs_padded == (min(b for b in sched.num_seqs_buckets if b >= len(unpadded)) if unpadded else 0)
