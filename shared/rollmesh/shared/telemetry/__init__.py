"""What a process tells about itself: logs with ids, traces, metrics. All of it is off until a process switches it on.

`logs` (also `log_context`) and `metrics` and `tracing` are what services call; `process.Telemetry` is what switches on.
"""

from rollmesh.shared.telemetry.config import TelemetryConfig
from rollmesh.shared.telemetry.logs import LoggingConfig, log_context, set_up_logging
from rollmesh.shared.telemetry.process import Telemetry

__all__ = ["LoggingConfig", "Telemetry", "TelemetryConfig", "log_context", "set_up_logging"]
