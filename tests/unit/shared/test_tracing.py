"""Spans: the one decision per episode, what travels, and that what is off or not sampled makes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.telemetry import TelemetryConfig, log_context, tracing
from rollmesh.shared.telemetry.logs import apart, context_id
from rollmesh.shared.telemetry.span_file import SpanFileExporter, read_spans

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
SAMPLED = UNSAMPLED[:-1] + "1"


class Recording:
    """Tracing that is on, with what it made."""

    def __init__(self, tracing_: tracing.Tracing, exporter: InMemorySpanExporter) -> None:
        self._tracing = tracing_
        self._exporter = exporter

    def finished(self) -> dict[str, ReadableSpan]:
        """Everything that ended, by name. Ends the tracing."""
        self._tracing.close(limit_s=10.0)
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def recording() -> Iterator[Recording]:
    exporter = InMemorySpanExporter()
    made = tracing.begin_tracing(exporter, process="test")
    yield Recording(made, exporter)
    made.close(limit_s=10.0)


def root(episode: str = "e1") -> trace.Span:
    made = tracing.begin_root("episode", "rollout", episode, tracing.now_ns(), {})
    assert made is not None
    return made


def test_spans_nest_over_a_traceparent(recording: Recording) -> None:
    above = root()
    with tracing.inside(above), tracing.span("asked", "rollout"):
        over_the_wire = tracing.traceparent()
    with tracing.span_below(over_the_wire, "served", "sandbox"):
        pass
    above.end()
    spans = recording.finished()
    assert set(spans) == {"episode", "asked", "served"}
    assert spans["served"].parent is not None
    assert spans["served"].parent.span_id == spans["asked"].context.span_id
    assert len({span.context.trace_id for span in spans.values()}) == 1


def test_outside_of_an_episode_nothing_is_made(recording: Recording) -> None:
    with tracing.span("a", "rollout") as made, tracing.span_below(UNSAMPLED, "b", "rollout") as below:
        assert made is None
        assert below is None
        assert tracing.traceparent() == ""
        assert tracing.trace_headers() == {}
    assert recording.finished() == {}


def test_off_makes_nothing_even_for_a_sampled_caller_but_passes_its_context_on() -> None:
    with tracing.span_below(SAMPLED, "a", "rollout") as made:
        assert made is None
    with tracing.call_span({"traceparent": SAMPLED}, "Service/Verb", {}):
        assert tracing.trace_headers()["traceparent"] == SAMPLED
        assert tracing.traceparent() == ""
    assert tracing.begin_root("episode", "rollout", "e1", 0, {}) is None


def test_the_ratio_is_kept_and_every_try_of_an_episode_is_decided_alike() -> None:
    made = tracing.begin_tracing(InMemorySpanExporter(), process="test", sample_ratio=0.25)
    try:
        chosen = [made.samples(f"g{group}.{member}") for group in range(500) for member in range(8)]
        assert 0.22 < sum(chosen) / len(chosen) < 0.28
        assert chosen == [made.samples(f"g{group}.{member}") for group in range(500) for member in range(8)]
    finally:
        made.close(limit_s=10.0)


async def test_a_task_apart_has_neither_span_nor_episode_but_the_node(recording: Recording) -> None:
    async def look() -> tuple[str, str, str]:
        return tracing.traceparent(), context_id("episode"), context_id("node")

    with log_context(node="n1", episode="e1"), tracing.inside(root()):
        mine = await asyncio.create_task(look())
        other = await asyncio.create_task(look(), context=apart())
    assert mine[0] != ""
    assert mine[1:] == ("e1", "n1")
    assert other == ("", "", "n1")


def test_a_failed_part_carries_its_cause(recording: Recording) -> None:
    with tracing.inside(root()), pytest.raises(ValueError, match="no"), tracing.span("part", "rollout"):
        raise ValueError("no")
    status = recording.finished()["part"].status
    assert (status.is_ok, status.description) == (False, "ValueError: no")


def test_only_one_mesh_of_a_process_traces(recording: Recording) -> None:
    with pytest.raises(ConfigError, match="only one mesh per process can"):
        tracing.begin_tracing(InMemorySpanExporter(), process="other")


def test_a_collector_that_hangs_does_not_hold_the_process() -> None:
    import threading
    import time

    class Hanging(InMemorySpanExporter):
        ended = threading.Event()

        def export(self, spans: object) -> object:  # type: ignore[override]
            return self.ended.wait(60.0)

        def shutdown(self) -> None:
            self.ended.set()

    made = tracing.begin_tracing(Hanging(), process="test")
    root().end()
    start_s = time.monotonic()
    made.close(limit_s=0.2)
    assert time.monotonic() - start_s < 30.0
    assert Hanging.ended.is_set()


def test_the_span_file_is_bounded_and_survives_a_line_cut_short(tmp_path: Path) -> None:
    path, bytes_max = tmp_path / "traces" / "p.jsonl", 400_000
    made = tracing.begin_tracing(SpanFileExporter(path, bytes_max=bytes_max), process="p")
    for number in range(6000):
        root(f"e{number}").end()
    made.close(limit_s=30.0)
    assert bytes_max < sum(file.stat().st_size for file in path.parent.iterdir()) <= 2 * bytes_max
    with path.open("ab") as file:
        file.write(b'{"trace": "0af')
    spans = list(read_spans(path.parent))
    assert "e5999" in {span.attributes[tracing.EPISODE] for span in spans}
    assert {span.process for span in spans} == {"p"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sample_ratio": 1.5}, "`sample_ratio` must be in"),
        ({"metrics_address": "localhost"}, "`metrics_address` must be IP:PORT"),
        ({"otlp_endpoint": "collector:4317"}, "`otlp_endpoint` must match"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TelemetryConfig(**given)  # type: ignore[arg-type]
