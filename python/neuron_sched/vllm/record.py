"""The admission record of a request."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.request import Request

__all__ = ["AdmissionRecord", "record_of"]


@dataclass(slots=True)
class AdmissionRecord:
    """Admission state of one request, stored on the request itself so that reading it needs no lookup."""

    worst_case_blocks: int
    """Most KV blocks that the request can need."""
    queue_position: int = 0
    """Arrival number over all waiting queues; a lower number is admitted first."""
    row: int | None = None
    """Row handle of the gate. `None` while the request has no reservation."""
    lora_id: int | None = None
    """Id of the LoRA adapter that the request uses. `None` unless it is running with an adapter."""
    drafts_allowed: bool = True
    """Whether the request may still be scheduled with draft tokens."""


def record_of(request: Request) -> AdmissionRecord | None:
    """Return the admission record of a request, or `None` if the request was never queued."""
    record: AdmissionRecord | None = getattr(request, "neuron", None)
    return record
