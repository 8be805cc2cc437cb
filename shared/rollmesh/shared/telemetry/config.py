"""The `telemetry` section of a run's configuration."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from msgspec import Meta

from rollmesh.shared.config.settings import Settings, Share
from rollmesh.shared.telemetry.logs import LoggingConfig


class TelemetryConfig(Settings):
    """Traces, metrics and logs of the processes of a run; see docs/observability.md. The value is `none`, because YAML
    reads `off` as a boolean."""

    traces: Literal["none", "file", "otlp"] = "none"
    """`file` appends spans as JSON lines to RUN/traces, for `rollmesh trace`; `otlp` sends them to a collector."""
    otlp_endpoint: Annotated[str, Meta(pattern="^https?://")] = "http://127.0.0.1:4317"
    """Collector's OTLP/gRPC address; https:// for TLS. Headers come from OTEL_EXPORTER_OTLP_HEADERS: configurations
    contain no secrets."""
    sample_ratio: Share = 1.0
    """Share of episodes that are traced, chosen by episode id, so all attempts of an episode are traced, or none. 0.01
    suffices for a busy mesh."""
    trace_file_bytes_max: Annotated[int, Meta(ge=4096)] = 64 * 1024 * 1024
    """Size in bytes at which a process's span file is renamed to `.old`. An earlier `.old` file is replaced, so a
    process uses at most twice this."""
    metrics: Literal["none", "prometheus"] = "none"
    """`prometheus` serves /metrics, per process, at `metrics_address`."""
    metrics_address: str = "127.0.0.1:0"
    """host:port. Port 0 takes a free port. Processes on one host take a fixed port and the ports after it. Written to
    RUN/metrics. Clients can read names and numbers of the run there, but no samples or secrets."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of the loggers of rollmesh. Libraries log from WARNING on."""
    log_format: Literal["plain", "json"] = "plain"
    """`plain` writes readable lines, `json` one JSON object per line for collectors."""

    def check_fields(self) -> None:
        self.metrics_place()

    def logging(self) -> LoggingConfig:
        """Return the settings for `set_up_logging`."""
        return LoggingConfig(level=self.log_level, format=self.log_format)

    def metrics_place(self) -> tuple[str, int]:
        """Return host and port of `metrics_address`. Raises ValueError."""
        host, _, port = self.metrics_address.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
            number = int(port)
        except ValueError:
            number = -1
        if not 0 <= number < 65536:
            raise ValueError(f"`metrics_address` must be IP:PORT, got {self.metrics_address!r}")
        return host.strip("[]"), number
