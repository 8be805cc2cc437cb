"""Logging with the ids of the current work.

`log_context(run=..., episode=...)` puts ids on every log line below it, through awaits and the tasks it starts; `node`
among them is also the label of metrics. Tasks that outlive or serve many of what they were started for are started in
`apart()`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Literal, TextIO

from opentelemetry import context as otel_context
from opentelemetry import trace

from rollmesh.shared.config.settings import Settings

_NO_IDS: Mapping[str, str] = {}
_ids: ContextVar[Mapping[str, str]] = ContextVar("rollmesh_log_ids", default=_NO_IDS)


class LoggingConfig(Settings):
    """Level and format of the log."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of the loggers of rollmesh. Libraries log from WARNING on."""
    format: Literal["plain", "json"] = "plain"
    """`plain` writes readable lines, `json` one JSON object per line for collectors."""


@contextmanager
def log_context(**ids: str) -> Iterator[None]:
    """Adds ids (run, episode, lease, node, ...) to the log lines of this context and of tasks started in it."""
    token = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def context_id(name: str) -> str:
    """Return an id of this context; empty if it does not exist."""
    return _ids.get().get(name, "")


def apart() -> Context:
    """A context for a task that serves more than what starts it: of the present one's ids only `node`, and no span."""
    made = copy_context()
    made.run(_keep_node_only)
    return made


def _keep_node_only() -> None:
    ids = _ids.get()
    if len(ids) > 1 or "node" not in ids:
        _ids.set({"node": ids["node"]} if "node" in ids else _NO_IDS)
    if trace.get_current_span() is not trace.INVALID_SPAN:
        otel_context.attach(trace.set_span_in_context(trace.INVALID_SPAN))


def set_up_logging(config: LoggingConfig | None = None, stream: TextIO | None = None) -> None:
    """Replaces the root logger's handlers by one that writes to `stream` (default: stderr). For processes, not for
    libraries."""
    config = config or LoggingConfig()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if config.format == "json" else _PlainFormatter())
    root = logging.getLogger()
    handler.addFilter(_says_something)
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("rollmesh").setLevel(config.level)


def _says_something(record: logging.LogRecord) -> bool:
    """False for asyncio's warning at the end of each TLS connection: no handler can act on it, and nothing is wrong."""
    return not (record.name == "asyncio" and "eof_received() has no effect when using ssl" in record.getMessage())


def _context_of_line() -> dict[str, str]:
    span = trace.get_current_span().get_span_context()
    traced = {"trace_id": f"{span.trace_id:032x}"} if span.is_valid else {}
    return {**_ids.get(), **traced}


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
