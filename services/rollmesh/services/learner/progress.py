"""The current state of a learner, for reports and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollmesh.shared.clock import Clock

PHASES = ("attach", "wait", "fetch", "decode", "train", "commit", "checkpoint", "publish")
"""Phases of a learner, one after the other. `wait` is the wait for a batch; the others are its work. What runs in the
background, such as an upload while it trains, is not in a phase until the learner waits for it."""


@dataclass(slots=True)
class LearnerProgress:
    """Only the learner writes it; other components may read it at any time."""

    clock: Clock
    update: int = 0
    """Last committed update."""
    incarnation: int = 0
    checkpoint_update: int = 0
    """Last update in a reported checkpoint."""
    published_step: int = -1
    """Last step published in this incarnation; -1 before the first."""
    phase: str = ""
    """Current phase, one of PHASES; empty between phases."""
    phase_since_s: float = 0.0
    """Start of the phase, on `clock`."""
    waiting_for: str = ""
    """Reason why no batch is available, from the coordinator; empty while there is a batch."""
    last_error: str = ""
    """Cause of the last restart from a checkpoint; empty if there was none."""
    num_attached: int = 0
    """Number of attaches; more than 1 means that the learner has restarted from a checkpoint."""
    refused: dict[str, str] = field(default_factory=dict)
    """Versions that the nodes refused, with the cause."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last update."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Total seconds per phase."""

    @property
    def doing(self) -> str:
        """Describe the current phase, e.g. "train of update 5 for 312 s", with the last error if there was one."""
        since_s = self.clock.monotonic_s() - self.phase_since_s
        now = f"{self.phase or 'between phases'} of update {self.update + 1} for {since_s:.0f} s"
        return (
            f"{now}; it restarted from its checkpoint {self.num_attached} times: {self.last_error}"
            if self.last_error
            else now
        )

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Add the time inside the block to `phase`."""
        assert phase in self.seconds, phase
        self.phase = phase
        start_s = self.phase_since_s = self.clock.monotonic_s()
        try:
            yield
        finally:
            self.seconds[phase] += self.clock.monotonic_s() - start_s
            self.phase = ""
