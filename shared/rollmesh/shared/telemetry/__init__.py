"""Logs with ids, traces and metrics of a process. All are off until a process switches them on.

Services call `logs` (also `log_context`), `metrics` and `tracing`. `process.Telemetry` switches them on.
"""

from rollmesh.shared.telemetry.config import TelemetryConfig
from rollmesh.shared.telemetry.logs import LoggingConfig, log_context, set_up_logging
from rollmesh.shared.telemetry.process import Telemetry

__all__ = ["LoggingConfig", "Telemetry", "TelemetryConfig", "log_context", "set_up_logging"]
