"""The config section `processes`, and the decision whether and when a process is restarted.

Pure except for the clock. Collaborator: `child`, which calls it after each failure.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated

from msgspec import Meta

from rollmesh.shared.clock import Clock
from rollmesh.shared.config.settings import NonNegativeInt, PositiveFloat, Settings
from rollmesh.shared.net.retry import pause_after

MIB = 1 << 20


class ProcessesConfig(Settings):
    """How the processes of a run are started, restarted and stopped."""

    enabled: bool = True
    """Run each service in a separate process, and restart a process that crashes. False: services share one process,
    except the learner if `run.max_staleness` > 0, because it trains while the others generate. This saves about 50 MB
    of memory and a second of start per service, but a crash of one service is a crash of all that share its process."""
    restarts_max: NonNegativeInt = 10
    """Restarts of one process within `window_s`. One more failure stops the run with its cause, because a repeated
    failure needs an operator. Single failures, days apart, do not add up."""
    window_s: PositiveFloat = 300.0
    """Length of the window in which restarts count, in seconds. It must exceed the sum of `restarts_max` pauses."""
    backoff_s: PositiveFloat = 0.2
    """Pause before the first restart in a window, in seconds. It is short, because most failures do not repeat."""
    backoff_s_max: PositiveFloat = 10.0
    """Longest pause, in seconds; the pause doubles with each restart. It must be long enough for the services that the
    process needs to restart."""
    start_s: PositiveFloat = 120.0
    """Timeout for the coordinator to respond after its start, in seconds. It covers the import of all services at once
    on few cores, and the recovery of a large ledger."""
    stop_s: PositiveFloat = 30.0
    """Time that a process has for a clean stop before it is killed, in seconds. A learner finishes its update and
    writes a checkpoint in 80 % of it, so large models need more."""
    log_bytes_max: Annotated[int, Meta(ge=4096)] = 16 * MIB
    """Size at which the log of a process is cut to its newest part, in bytes. Half of it is kept, at most 1 MiB."""

    def check_fields(self) -> None:
        if self.backoff_s_max < self.backoff_s:
            raise ValueError(f"`backoff_s_max` must be >= backoff_s = {self.backoff_s}, got {self.backoff_s_max}")


class Restarts:
    """Restarts of one process."""

    def __init__(self, config: ProcessesConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._crashes_s: deque[float] = deque()

    @property
    def num_recent(self) -> int:
        """Number of restarts in the current window."""
        return len(self._crashes_s)

    def next_pause_s(self) -> float | None:
        """Return the pause before the next start after a failure; None if there were too many."""
        now_s = self._clock.monotonic_s()
        while self._crashes_s and now_s - self._crashes_s[0] > self._config.window_s:
            self._crashes_s.popleft()
        if len(self._crashes_s) >= self._config.restarts_max:
            return None
        self._crashes_s.append(now_s)
        return pause_after(len(self._crashes_s), self._config.backoff_s, self._config.backoff_s_max)
