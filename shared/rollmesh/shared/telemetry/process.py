"""Switch a process's traces and metrics on, as its configuration requires, and off again.

    async with Telemetry(config.telemetry, folder=run_dir, process="coordinator+depot") as telemetry:
        telemetry.add_source("depot", source)

It does not set up logging. A process does that with `set_up_logging`, because the mesh may run in another application's
process. Libraries of the extra `telemetry` are loaded only if they are configured.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from opentelemetry.sdk.trace.export import SpanExporter

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.process.process_info import observe_at
from rollmesh.shared.telemetry import metrics, tracing
from rollmesh.shared.telemetry.config import TelemetryConfig
from rollmesh.shared.telemetry.metrics import Source
from rollmesh.shared.telemetry.span_file import FOLDER as TRACES
from rollmesh.shared.telemetry.span_file import SpanFileExporter

if TYPE_CHECKING:
    from rollmesh.shared.telemetry.prometheus import PrometheusMeter

CLOSE_S_MAX = 2.0
"""Timeout of the export of remaining spans when the process stops, in seconds."""
OTLP_S_MAX = 5.0
"""Longest time, retries included, for one batch of spans to a collector; then the batch is lost."""
_INSTALL = "is not installed: pip install 'rollmesh[telemetry]'"
_log = logging.getLogger(__name__)


class Telemetry:
    """Traces and metrics while entered. With both `none` it does nothing."""

    def __init__(self, config: TelemetryConfig, *, folder: Path, process: str) -> None:
        """Files are written into `folder` and named after `process`."""
        self._config = config
        self._folder = folder
        self._process = process.replace("/", "_")[:100]
        self._stack = AsyncExitStack()
        self._meter: PrometheusMeter | None = None
        self.metrics_address = ""
        """host:port of /metrics; empty without metrics."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._config.traces != "none":
                self._trace(stack)
            if self._config.metrics == "prometheus":
                await self._measure(stack)
            self._announce(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _announce(self, stack: AsyncExitStack) -> None:
        """Let the nodes of this process report where its metrics and spans are."""
        traces = str((self._folder / TRACES).resolve()) if self._config.traces == "file" else ""
        if traces or self.metrics_address:
            observe_at(metrics_address=self.metrics_address, traces_folder=traces)
            stack.callback(observe_at, metrics_address="", traces_folder="")

    @property
    def is_on(self) -> bool:
        """Whether traces or metrics are configured."""
        return self._config.traces != "none" or self._config.metrics != "none"

    def add_source(self, node: str, source: Source) -> None:
        """Expose a node's metrics if metrics are on."""
        if self._meter is not None:
            self._meter.add_source(node, source)

    def remove_source(self, node: str) -> None:
        if self._meter is not None:
            self._meter.remove_source(node)

    def _trace(self, stack: AsyncExitStack) -> None:
        config = self._config
        made = tracing.begin_tracing(self._exporter(), process=self._process, sample_ratio=config.sample_ratio)
        stack.push_async_callback(asyncio.to_thread, made.close, CLOSE_S_MAX)

    def _exporter(self) -> SpanExporter:
        config = self._config
        if config.traces == "file":
            path = self._folder / TRACES / f"{self._process}.jsonl"
            return SpanFileExporter(path, bytes_max=config.trace_file_bytes_max)
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        except ImportError as err:
            raise ConfigError(f"telemetry.traces = otlp: opentelemetry-exporter-otlp-proto-grpc {_INSTALL}") from err
        insecure = config.otlp_endpoint.startswith("http://")
        return OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=insecure, timeout=OTLP_S_MAX)

    async def _measure(self, stack: AsyncExitStack) -> None:
        try:
            import uvicorn  # noqa: F401 (the meter's server imports it)

            from rollmesh.shared.telemetry.prometheus import PrometheusMeter
        except ImportError as err:
            raise ConfigError(f"telemetry.metrics = prometheus: {err.name} {_INSTALL}") from err
        if metrics.is_on():
            raise ConfigError(
                "telemetry.metrics: another mesh of this process has metrics on, and only one mesh per process can"
            )
        meter = PrometheusMeter()
        stack.push_async_callback(meter.close)
        self.metrics_address = await meter.serve(
            *self._config.metrics_place(), folder=self._folder, process=self._process
        )
        stack.callback(metrics.use, None)
        metrics.use(meter)
        self._meter = meter
        _log.info("metrics at http://%s/metrics", self.metrics_address)
