"""Limits that both sides of a call must agree on."""

from __future__ import annotations

from dataclasses import dataclass

MESSAGE_BYTES_MAX = 8 * 1024 * 1024
"""Largest message either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a service accepts beyond the limit of a message; None means no limit."""

    text_bytes: int | None = None
    """Largest text in a request."""
    request_bytes: int | None = None
    """Largest request."""


RECORDED = RequestLimits(request_bytes=6 * 1024 * 1024)
"""Of CoordinatorService: what it takes ends up in ledger records, and a record must fit a message of NATS."""
RECORDED_TEXTS = RequestLimits(text_bytes=64 * 1024, request_bytes=RECORDED.request_bytes)
"""Of RunService, whose texts are names, reasons and settings."""
