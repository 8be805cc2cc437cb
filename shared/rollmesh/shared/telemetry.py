"""Logging with the ids of what is being worked on, and opt-in tracing.

`log_context(run=..., episode=...)` puts ids on every log line below it, through awaits and the tasks it starts. Tracing is off until
`set_up_tracing` is called: the interceptors and the bus then cost nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TextIO

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

_ids: ContextVar[Mapping[str, str]] = ContextVar("rollmesh_log_ids")


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged, and how."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of rollmesh's own loggers; libraries log from WARNING on."""
    format: Literal["plain", "json"] = "plain"
    """Lines for people, or one JSON object per line for collectors."""


@contextmanager
def log_context(**ids: str) -> Iterator[None]:
    """Adds ids (run, episode, lease, node, ...) to the log lines of this context and of tasks started in it."""
    token = _ids.set({**_ids.get({}), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def set_up_logging(config: LoggingConfig | None = None, stream: TextIO | None = None) -> None:
    """Replaces the root logger's handlers by one that writes to `stream` (default: stderr). For processes, not for libraries."""
    config = config or LoggingConfig()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if config.format == "json" else _PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("rollmesh").setLevel(config.level)


def set_up_tracing(service: str, exporter: SpanExporter) -> TracerProvider:
    """Turns tracing on in this process. The caller shuts the returned provider down, which flushes it."""
    provider = TracerProvider(resource=Resource.create({"service.name": f"rollmesh-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider


def _context_of_line() -> dict[str, str]:
    span = trace.get_current_span().get_span_context()
    traced = {"trace_id": f"{span.trace_id:032x}"} if span.is_valid else {}
    return {**_ids.get({}), **traced}


class _PlainFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{key}={value}" for key, value in _context_of_line().items())
        return super().formatMessage(record) + (f" [{ids}]" if ids else "")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_context_of_line(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
