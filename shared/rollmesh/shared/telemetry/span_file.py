"""Spans as JSON lines in a file, for users without a collector, and the reader of the file.

One line per finished span, appended whole, in the order of their ends. At its limit the file is renamed to `.old`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.store.private_files import private_folder, private_opener
from rollmesh.shared.telemetry.tracing import SERVICE_PREFIX

FOLDER = "traces"
"""Folder of span files, in the run folder."""
_log = logging.getLogger(__name__)


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished span."""

    trace: str
    """32 hexadecimal digits."""
    span: str
    """16 hexadecimal digits."""
    parent: str = ""
    """Id of the parent; empty for a root."""
    name: str
    service: str
    process: str = ""
    start_unix_ns: int
    duration_ns: int
    attributes: dict[str, str | int | float | bool] = {}
    links: list[tuple[str, str]] = []
    """(trace, span) of each linked span."""
    error: str = ""
    """Cause of a failure; empty without one."""


class SpanFileExporter(SpanExporter):
    """Appends to `path`. A full disk loses spans but does not fail the run."""

    def __init__(self, path: Path, *, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        private_folder(path.parent)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = b"".join(msgspec.json.encode(_record(span)) + b"\n" for span in spans)
        try:
            if self._path.exists() and self._path.stat().st_size + len(lines) > self._bytes_max:
                os.replace(self._path, self._path.with_suffix(".old.jsonl"))
            with open(self._path, "ab", opener=private_opener) as file:
                file.write(lines)
        except OSError as err:
            _log.warning("%d spans are lost: %s: %s", len(spans), self._path, err.strerror)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is held open."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def read_spans(folder: Path) -> Iterator[SpanRecord]:
    """Return every span of the files in a folder. A line that a kill truncated is skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                try:
                    yield msgspec.json.decode(line, type=SpanRecord)
                except UNDECODABLE:
                    continue


def _record(span: ReadableSpan) -> SpanRecord:
    context, scope = span.get_span_context(), span.instrumentation_scope
    assert context is not None, "a finished span has a context"
    start_ns, end_ns = span.start_time or 0, span.end_time or 0
    failed = span.status.status_code is StatusCode.ERROR
    return SpanRecord(
        trace=f"{context.trace_id:032x}",
        span=f"{context.span_id:016x}",
        parent=f"{span.parent.span_id:016x}" if span.parent is not None else "",
        name=span.name,
        service=scope.name.removeprefix(SERVICE_PREFIX) if scope is not None else "",
        process=str(span.resource.attributes.get("service.instance.id", "")),
        start_unix_ns=start_ns,
        duration_ns=end_ns - start_ns,
        attributes=dict(span.attributes or {}),  # type: ignore[arg-type]  # ours are scalars, see `tracing.Attributes`
        links=[(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links],
        error=(span.status.description or "failed") if failed else "",
    )
