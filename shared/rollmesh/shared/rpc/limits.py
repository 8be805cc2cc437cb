"""Limits that both sides of a call must agree on."""

from __future__ import annotations

from dataclasses import dataclass

MESSAGE_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size of a message in each direction, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Further limits of a service's requests; None means no limit."""

    text_bytes: int | None = None
    """Maximum size of a text in a request, in bytes."""
    long_texts: frozenset[str] = frozenset()
    """Methods to which `text_bytes` does not apply."""
    request_bytes: int | None = None
    """Maximum size of a request, in bytes."""


RECORDED = RequestLimits(request_bytes=6 * 1024 * 1024)
"""Limits of CoordinatorService. Its requests are stored in ledger records, and a record must fit into a NATS
message."""
RECORDED_TEXTS = RequestLimits(
    text_bytes=64 * 1024,
    long_texts=frozenset({"SubmitTasks", "SubmitSamples", "OpenEpisode"}),
    request_bytes=RECORDED.request_bytes,
)
"""Limits of RunService, whose texts are names, reasons and settings, except for the tasks and samples of clients."""
