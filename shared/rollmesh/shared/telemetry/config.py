"""The `telemetry` section of a run's configuration."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from msgspec import Meta

from rollmesh.shared.settings import Settings, Share
from rollmesh.shared.telemetry.logs import LoggingConfig


class TelemetryConfig(Settings):
    """Traces, metrics and logs of the processes of a run; see docs/observability.md. (YAML reads `off` as a boolean: hence none.)"""

    traces: Literal["none", "file", "otlp"] = "none"
    """`file` appends spans as JSON lines to RUN/traces, for `rollmesh trace`; `otlp` sends them to a collector."""
    otlp_endpoint: Annotated[str, Meta(pattern="^https?://")] = "http://127.0.0.1:4317"
    """Collector's OTLP/gRPC address; https:// for TLS. Headers come from OTEL_EXPORTER_OTLP_HEADERS: secrets stay out of configs."""
    sample_ratio: Share = 1.0
    """Share of episodes that are traced, chosen by episode id; all tries of one are, or none. 0.01 is plenty for a busy mesh."""
    trace_file_bytes_max: Annotated[int, Meta(ge=4096)] = 64 * 1024 * 1024
    """Size at which a process's span file is put aside as `.old`, replacing the one before: at most twice this per process."""
    metrics: Literal["none", "prometheus"] = "none"
    """`prometheus` serves /metrics, per process, at `metrics_address`."""
    metrics_address: str = "127.0.0.1:0"
    """host:port. Port 0 takes a free one; with a fixed one, processes on a host take it and those after it. Written to RUN/metrics.
    Whoever reaches it reads names and numbers of the run, never samples or secrets."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of rollmesh's own loggers; libraries log from WARNING on."""
    log_format: Literal["plain", "json"] = "plain"
    """Lines for people, or one JSON object per line for collectors."""

    def check_fields(self) -> None:
        self.metrics_place()

    def logging(self) -> LoggingConfig:
        """The part that `set_up_logging` takes."""
        return LoggingConfig(level=self.log_level, format=self.log_format)

    def metrics_place(self) -> tuple[str, int]:
        """Host and port of `metrics_address`. ValueError."""
        host, _, port = self.metrics_address.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
            number = int(port)
        except ValueError:
            number = -1
        if not 0 <= number < 65536:
            raise ValueError(f"metrics_address must be IP:PORT, got {self.metrics_address!r}")
        return host.strip("[]"), number
