"""Interpreter settings for a process that runs an event loop and model compute side by side.

An event loop that is busy gives the interpreter lock away only every `switchinterval`, and a compute thread asks for it after
every tensor operation. At Python's default of 5 ms a small model's update was measured to take six times as long beside a
busy loop; at 0.2 ms, 1.2 times (`rollmesh bench switch_interval`).

A collection walks every object of every service. What lives since start-up need not be walked again.
"""

from __future__ import annotations

import gc
import sys

SWITCH_INTERVAL_S = 0.0002
GC_THRESHOLDS = (50_000, 20, 50)


def tune_process() -> None:
    """Settings of the whole process; call it once the services are up. Idempotent."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
