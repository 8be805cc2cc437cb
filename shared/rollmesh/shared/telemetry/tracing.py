"""Spans. If tracing is off, or outside of a sampled episode, every call returns immediately and creates neither a span
nor a header.

Only the root span of an episode decides about sampling (`begin_root`, by the episode's id). All other spans check
whether the current span is sampled. A context comes from the caller's task, or over the network as a W3C traceparent:
in gRPC metadata for separate calls, in a field of the message if many episodes share a stream or a request.

The provider belongs to this module. OpenTelemetry's global provider can be set only once, but a process may run several
meshes in turn.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rollmesh.shared.errors import ConfigError

Attributes = Mapping[str, str | int | float | bool]
SERVICE_PREFIX = "rollmesh."
"""Prefix of instrumentation scopes, as in `rollmesh.rollout`."""
EPISODE = "rollmesh.episode"
"""Attribute of root spans: the episode's id."""
EXPORT_DELAY_S = 1.0
"""Longest time that a finished span waits in memory, in seconds. A killed process loses these spans."""
QUEUE_MAX = 65536
"""Maximum number of finished spans that wait; more are lost. A commit ends three for each traced episode of its batch
at once."""

_HEADER = "traceparent"
_NOTHING: AbstractContextManager[Span | None] = nullcontext(None)
_NO_HEADERS: Mapping[str, str] = {}
_propagator = TraceContextTextMapPropagator()
_tracing: Tracing | None = None


class Tracing:
    """Tracing of this process, from `begin_tracing` to `close`."""

    def __init__(self, exporter: SpanExporter, *, process: str, sample_ratio: float) -> None:
        self._exporter = exporter
        # A name for each kind of service, so that a map of services shows them apart; the instance is the process.
        names = {
            "service.namespace": "rollmesh",
            "service.name": process.partition("-")[0],
            "service.instance.id": process,
        }
        resource = Resource.create(names)
        self._provider = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter, max_queue_size=QUEUE_MAX, schedule_delay_millis=1000 * EXPORT_DELAY_S)
        self._provider.add_span_processor(processor)
        self._tracers: dict[str, trace.Tracer] = {}
        self._threshold = int(sample_ratio * 2**32)

    def tracer(self, service: str) -> trace.Tracer:
        if service not in self._tracers:
            self._tracers[service] = self._provider.get_tracer(SERVICE_PREFIX + service)
        return self._tracers[service]

    def samples(self, episode: str) -> bool:
        """Return the same decision for every attempt of an episode, in every process."""
        return zlib.crc32(episode.encode()) < self._threshold

    def close(self, limit_s: float) -> None:
        """Export the remaining spans for at most `limit_s`, because an unavailable collector must not block the
        process. Blocks."""
        global _tracing
        _tracing = None
        ending = threading.Thread(target=self._provider.shutdown, name="tracing shutdown", daemon=True)
        ending.start()
        ending.join(limit_s)
        if ending.is_alive():
            self._exporter.shutdown()  # ends its retries


def begin_tracing(exporter: SpanExporter, *, process: str, sample_ratio: float = 1.0) -> Tracing:
    """Switch tracing on in this process. ConfigError if it is on."""
    global _tracing
    if _tracing is not None:
        raise ConfigError(
            "telemetry.traces: another mesh of this process has tracing on, and only one mesh per process can"
        )
    _tracing = Tracing(exporter, process=process, sample_ratio=sample_ratio)
    return _tracing


def is_on() -> bool:
    return _tracing is not None


def now_ns() -> int:
    """The clock of spans."""
    return time.time_ns()


# The present span -----------------------------------------------------------------------------------------------------


def current() -> SpanContext | None:
    """Return the current span of this task if it is sampled."""
    context = trace.get_current_span().get_span_context()
    return context if context.trace_flags.sampled else None


def traceparent() -> str:
    """Return the current span as a W3C traceparent; empty outside of a sampled one."""
    return "" if _tracing is None else trace_headers().get(_HEADER, "")


def trace_headers() -> Mapping[str, str]:
    """Return the current span as W3C headers; empty outside of a sampled one. A process without tracing passes the
    received headers on."""
    if current() is None:
        return _NO_HEADERS
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers


def parent_in(headers: Mapping[str, str]) -> Context | None:
    """Return the sampled span that the headers name."""
    if _HEADER not in headers:
        return None
    context = _propagator.extract(headers, Context())
    return context if trace.get_current_span(context).get_span_context().trace_flags.sampled else None


def parent_of(parent: str) -> Context | None:
    """Return the sampled span that a traceparent names."""
    return parent_in({_HEADER: parent}) if parent else None


# Making spans ---------------------------------------------------------------------------------------------------------


def span(name: str, service: str, attributes: Attributes | None = None) -> AbstractContextManager[Span | None]:
    """Create a span below the current one around a block. No effect outside of a sampled span."""
    if _tracing is None or current() is None:
        return _NOTHING
    return _around(_tracing, name, service, None, attributes)


def span_below(
    parent: str, name: str, service: str, attributes: Attributes | None = None
) -> AbstractContextManager[Span | None]:
    """A span around a block below one of another process; nothing if `parent` names no sampled one."""
    if _tracing is None or not parent or (context := parent_of(parent)) is None:
        return _NOTHING
    return _around(_tracing, name, service, context, attributes)


def call_span(headers: Mapping[str, str], name: str, attributes: Attributes) -> AbstractContextManager[Span | None]:
    """Around the serving of a call: a span if tracing is on here, else the caller's own, so that calls further on carry
    it."""
    context = parent_in(headers)
    if context is None:
        return _NOTHING
    if _tracing is None:
        return _inside(context)
    return _around(_tracing, name, "rpc", context, attributes, trace.SpanKind.SERVER)


@contextmanager
def spans_below(
    parents: Iterable[str], name: str, service: str, attributes: Attributes | None = None
) -> Iterator[None]:
    """Around work on many episodes at once: one span in each one's trace."""
    with ExitStack() as stack:
        if _tracing is not None:
            for parent in filter(None, parents):
                stack.enter_context(span_below(parent, name, service, attributes))
        yield


def begin_root(name: str, service: str, episode: str, start_ns: int, attributes: Attributes) -> Span | None:
    """The root span of an episode, if it is sampled. The caller enters it with `inside` and ends it."""
    if _tracing is None or not _tracing.samples(episode):
        return None
    return _tracing.tracer(service).start_span(
        name, Context(), attributes={EPISODE: episode, **attributes}, start_time=start_ns
    )


def begin_update(
    name: str, service: str, start_ns: int, attributes: Attributes, linked: Sequence[Context]
) -> Span | None:
    """The root span of work on many episodes, linked to each. The caller ends it."""
    if _tracing is None or not linked:
        return None
    links = [trace.Link(trace.get_current_span(context).get_span_context()) for context in linked]
    return _tracing.tracer(service).start_span(name, Context(), attributes=attributes, links=links, start_time=start_ns)


def inside(made: Span | None) -> AbstractContextManager[Span | None]:
    """Make `made` the current span, without ending it."""
    return _NOTHING if made is None else trace.use_span(made, record_exception=False)


@contextmanager
def span_at(
    parent: Context, name: str, service: str, start_ns: int, end_ns: int, attributes: Attributes
) -> Iterator[None]:
    """Create a span of finished work, around the recording of its parts."""
    if _tracing is None:
        yield
        return
    made = _tracing.tracer(service).start_span(name, parent, attributes=attributes, start_time=start_ns)
    with inside(made):
        yield
    made.end(end_ns)


def record(
    parent: Context | Span | None,
    name: str,
    service: str,
    start_ns: int,
    end_ns: int,
    attributes: Attributes | None = None,
    linked: Span | None = None,
) -> None:
    """Create a span of finished work, below the current span if `parent` is absent."""
    if _tracing is None:
        return
    context = trace.set_span_in_context(parent, Context()) if isinstance(parent, Span) else parent
    links = () if linked is None else (trace.Link(linked.get_span_context()),)
    made = _tracing.tracer(service).start_span(name, context, attributes=attributes, links=links, start_time=start_ns)
    made.end(end_ns)


def _around(
    tracing: Tracing,
    name: str,
    service: str,
    context: Context | None,
    attributes: Attributes | None,
    kind: trace.SpanKind = trace.SpanKind.INTERNAL,
) -> AbstractContextManager[Span | None]:
    # The failure's text becomes the span's status; its traceback belongs in the log.
    return tracing.tracer(service).start_as_current_span(name, context, kind, attributes, record_exception=False)


@contextmanager
def _inside(context: Context) -> Iterator[None]:
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)
