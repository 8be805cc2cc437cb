"""The durable log: the port, its JetStream implementation, and the embedded server."""

from __future__ import annotations

import sys


def _import_nats() -> None:
    """Import nats-py without aiohttp, which it uses for WebSockets only and which takes 0.15 s of processor time in
    each process of a run."""
    absent = "aiohttp" not in sys.modules
    if absent:
        sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        if absent:
            del sys.modules["aiohttp"]


_import_nats()
