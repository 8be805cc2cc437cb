"""Trace one update, and add the update to the traces of its episodes.

An update with a traced episode has a separate trace: `update` with `batch lease`, `fetch`, `train`, `commit`, linked to
every traced episode. Each traced episode gets `batch lease`, `train` and `commit` below its root, linked back, so that
its trace covers its whole lifecycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode

from rollmesh.client import BatchLease
from rollmesh.shared.telemetry import tracing

SERVICE = "learner"
LEASE, FETCH, TRAIN, COMMIT = "batch lease", "fetch", "train", "commit"


class UpdateSpans:
    """Record the spans of one update. It has no effect unless `fetched` reports a traced episode."""

    def __init__(self, lease: BatchLease, asked_ns: int, leased_ns: int) -> None:
        """`asked_ns` and `leased_ns` are the times of the request and of its reply, on the clock of spans."""
        self._asked_ns = asked_ns
        self._leased_ns = leased_ns
        self._attributes: tracing.Attributes = {"rollmesh.update": lease.update, "rollmesh.lease": lease.lease_id}
        self._span: Span | None = None
        self._episodes: list[Context] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._span is not None:
            if err is not None:
                self._span.set_status(StatusCode.ERROR, f"{type(err).__name__}: {err}")
            self._span.end()

    def fetched(self, traceparents: Sequence[str]) -> None:
        """Start the trace if the batch contains traced episodes."""
        if not traceparents or not tracing.is_on():
            return
        now_ns = tracing.now_ns()
        found = (tracing.parent_of(parent) for parent in traceparents)
        self._episodes = [context for context in found if context is not None]
        self._span = tracing.begin_update("update", SERVICE, self._asked_ns, self._attributes, self._episodes)
        if self._span is not None:
            tracing.record(self._span, LEASE, SERVICE, self._asked_ns, self._leased_ns)
            tracing.record(self._span, FETCH, SERVICE, self._leased_ns, now_ns)
            self._record_in_episodes(LEASE, self._asked_ns, self._leased_ns)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record a part of the update as a span around the block, and in the traces of the episodes if it succeeds."""
        if self._span is None:
            yield
            return
        start_ns = tracing.now_ns()
        with tracing.inside(self._span), tracing.span(name, SERVICE):
            yield
        self._record_in_episodes(name, start_ns, tracing.now_ns())

    def _record_in_episodes(self, name: str, start_ns: int, end_ns: int) -> None:
        for context in self._episodes:
            tracing.record(context, name, SERVICE, start_ns, end_ns, self._attributes, self._span)
