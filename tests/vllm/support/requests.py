"""Requests added to a scheduler, and the ids of its requests."""

from vllm.lora.request import LoRARequest

from tests.vllm.support.harness import request


def with_adapter(req, number):
    """Set the LoRA adapter of a request, and return the request."""
    req.lora_request = LoRARequest(f"adapter-{number}", number, f"/adapters/{number}")
    return req


def add(sched, **requests):
    """Add requests: `add(s, a=(6, 4))` adds "a" with a prompt of 6 tokens and `max_tokens` 4."""
    for name, (prompt_len, max_tokens, *rest) in requests.items():
        sched.add_request(request(name, prompt_len, max_tokens, **(rest[0] if rest else {})))


def request_ids(requests):
    """Return the ids of requests, in order."""
    return [r.request_id for r in requests]


def waiting_ids(sched):
    """Return the ids of all waiting requests, queue by queue. The queues depend on the release."""
    queues = (getattr(sched, name, ()) for name in ("waiting", "skipped_waiting", "kv_holding_waiting"))
    return [r.request_id for queue in queues for r in queue]
