"""How processes are kept alive: the config section `processes`, and the decision whether and when one is started again.

Pure but for the clock it is given. Collaborator: `child`, which asks after each death.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated

from msgspec import Meta

from rollmesh.shared.clock import Clock
from rollmesh.shared.retry import pause_after
from rollmesh.shared.settings import NonNegativeInt, PositiveFloat, Settings

MIB = 1 << 20


class ProcessesConfig(Settings):
    """A run as processes: one for each part."""

    enabled: bool = True
    """Each part in a process of its own, started again when it dies. False: all parts share one process, which saves about 50 MB of
    memory and a second of start per part, but a crash of one part is a crash of all."""
    restarts_max: NonNegativeInt = 10
    """Restarts of one process within `window_s`; one more death stops the run with its cause. A fault that repeats (a full disk, a
    bug) must come to light; single deaths, days apart, must not add up."""
    window_s: PositiveFloat = 300.0
    """Length of the window in which restarts count, seconds. Longer than `restarts_max` pauses take together."""
    backoff_s: PositiveFloat = 0.2
    """Pause before the first restart in a window, seconds. Short: most deaths do not repeat, and work waits."""
    backoff_s_max: PositiveFloat = 10.0
    """Longest pause; it doubles from one restart to the next. Long enough for what the process needs to come back itself."""
    start_s: PositiveFloat = 120.0
    """How long the coordinator may take from the start until it answers, seconds. It covers the import of all parts at once on few
    cores, and the recovery of a large ledger."""
    stop_s: PositiveFloat = 30.0
    """How long a process may take to stop in good order before it is killed, seconds. A learner finishes its update and writes
    a checkpoint in 80 % of it: longer for large models."""
    log_bytes_max: Annotated[int, Meta(ge=4096)] = 16 * MIB
    """Size at which the log of a process is cut to its newest part (half of this, at most 1 MiB)."""

    def check_fields(self) -> None:
        if self.backoff_s_max < self.backoff_s:
            raise ValueError(f"`backoff_s_max` must be >= backoff_s = {self.backoff_s}, got {self.backoff_s_max}")


class Restarts:
    """The restarts of one process."""

    def __init__(self, config: ProcessesConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._deaths_s: deque[float] = deque()

    @property
    def num_recent(self) -> int:
        """Restarts granted in the present window."""
        return len(self._deaths_s)

    def next_pause_s(self) -> float | None:
        """After a death: the pause before the next start; None if there were too many."""
        now_s = self._clock.monotonic_s()
        while self._deaths_s and now_s - self._deaths_s[0] > self._config.window_s:
            self._deaths_s.popleft()
        if len(self._deaths_s) >= self._config.restarts_max:
            return None
        self._deaths_s.append(now_s)
        return pause_after(len(self._deaths_s), self._config.backoff_s, self._config.backoff_s_max)
