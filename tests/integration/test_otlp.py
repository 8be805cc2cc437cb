"""Spans reach a collector over OTLP/gRPC; one that is not there holds nothing up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from rollmesh.shared.telemetry import Telemetry, TelemetryConfig, tracing

STOP_S_MAX = 20.0
"""Far above CLOSE_S_MAX, far below the exporter's own patience of a minute and more."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.resources: list[dict[str, str]] = []

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def make_spans() -> None:
    root = tracing.begin_root("episode", "rollout", "e1", tracing.now_ns(), {})
    assert root is not None
    with tracing.inside(root), tracing.span("generate", "rollout"):
        pass
    root.end()


async def test_a_collector_gets_the_spans_with_their_process(tmp_path: Path) -> None:
    collector, server = Collector(), grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        config = TelemetryConfig(traces="otlp", otlp_endpoint=f"http://127.0.0.1:{port}")
        async with Telemetry(config, folder=tmp_path, process="rollout-0"):
            make_spans()
    finally:
        await server.stop(None)
    assert sorted(collector.names) == ["episode", "generate"]
    assert collector.resources[0]["service.name"] == "rollout"
    assert collector.resources[0]["service.instance.id"] == "rollout-0"


async def test_a_collector_that_is_away_does_not_hold_the_stop(tmp_path: Path) -> None:
    config = TelemetryConfig(traces="otlp", otlp_endpoint="http://127.0.0.1:9")  # nothing listens at the discard port
    telemetry = Telemetry(config, folder=tmp_path, process="rollout-0")
    await telemetry.__aenter__()
    make_spans()
    start_s = time.monotonic()
    await telemetry.__aexit__(None, None, None)
    assert time.monotonic() - start_s < STOP_S_MAX
    assert not tracing.is_on()
