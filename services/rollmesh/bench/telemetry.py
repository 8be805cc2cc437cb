"""Cost of telemetry if it is off, if an episode is not sampled, and if it is sampled: CPU nanoseconds per call.

Calls as services make them, on one thread, against a loop of empty calls (subtracted). Exported spans are dropped: the cost of a collector or a
file is extra, on a separate thread. How to read it: an episode of 6 turns and 5 tool calls makes about 60 of these calls; a turn of
the mesh takes milliseconds (`mesh_turn`). Off and not sampled should cost the same, and little compared with a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from benchmarks.report import Report, spread
from rollmesh.services.rollout.metrics import TOOL_CALLS
from rollmesh.shared.telemetry import log_context, metrics, tracing

SERVICE = "bench"


class _Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class _Counting:
    """A meter that records nothing."""

    def count(self, metric: metrics.Metric, node: str, labels: tuple[str, ...], amount: float) -> None: ...

    def observe(self, metric: metrics.Metric, node: str, labels: tuple[str, ...], value: float) -> None: ...


def run(quick: bool) -> Report:
    num, repetitions = (5_000, 3) if quick else (50_000, 9)
    report = Report("telemetry", f"{num:,} calls, median of {repetitions} (smallest-largest), ns of CPU per call")
    states = {"off": _off, "on, not sampled": _unsampled, "on, sampled": _sampled}
    columns = {name: _column(enter, num, repetitions) for name, enter in states.items()}
    report.rows = [{"call": call} | {name: column[call] for name, column in columns.items()} for call in _CALLS]
    return report


def _column(enter: Callable[[], AbstractContextManager[object]], num: int, repetitions: int) -> dict[str, object]:
    with enter():
        return {
            name: spread([(_cpu_ns(call, num) - _cpu_ns(_nothing, num)) / num for _ in range(repetitions)])
            for name, call in _CALLS.items()
        }


def _cpu_ns(call: Callable[[], object], num: int) -> int:
    start_ns = time.thread_time_ns()
    for _ in range(num):
        call()
    return time.thread_time_ns() - start_ns


def _off() -> AbstractContextManager[object]:
    return nullcontext()


def _unsampled() -> AbstractContextManager[object]:
    return _traced(0.0)


def _sampled() -> AbstractContextManager[object]:
    return _traced(1.0)


def _traced(ratio: float) -> AbstractContextManager[object]:
    stack = ExitStack()
    made = tracing.begin_tracing(_Nowhere(), process=SERVICE, sample_ratio=ratio)
    stack.callback(made.close, 5.0)
    metrics.use(_Counting())
    stack.callback(metrics.use, None)
    root = tracing.begin_root("episode", SERVICE, "e1", tracing.now_ns(), {})
    stack.enter_context(tracing.inside(root))
    return stack


def _nothing() -> None:
    return None


def _span() -> None:
    with tracing.span("generate", SERVICE):
        pass


def _log_context() -> None:
    with log_context(run="r", episode="e1", lease="l1"):
        pass


_CALLS: dict[str, Callable[[], object]] = {
    "span around a block": _span,
    "traceparent of a message": tracing.traceparent,
    "headers of a call or record": tracing.trace_headers,
    "count": lambda: metrics.count(TOOL_CALLS, "ok"),
    "ids on log lines (always on)": _log_context,
}
