"""What a learner tells about itself while it works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollmesh.shared.clock import Clock

PHASES = ("attach", "wait", "fetch", "train", "commit", "checkpoint", "publish")
"""Where a learner's time goes. `wait` is for a batch; all else is the learner's own."""


@dataclass(slots=True)
class LearnerProgress:
    """Read at any time; written by the learner alone."""

    clock: Clock
    update: int = 0
    """Last committed update."""
    incarnation: int = 0
    checkpoint_update: int = 0
    """Last update in a reported checkpoint."""
    published_step: int = -1
    """Last step published in this incarnation; -1 if none."""
    phase: str = ""
    """What it does now; one of PHASES, or empty between them."""
    phase_since_s: float = 0.0
    """When it began that, on `clock`."""
    waiting_for: str = ""
    """What a batch waits for, in the coordinator's words; empty while there is one."""
    last_error: str = ""
    """Why it went back to its checkpoint, or to an older one, the last time; empty if it never did."""
    num_attached: int = 0
    """How often it attached; more than once means that it went back."""
    refused: dict[str, str] = field(default_factory=dict)
    """Versions of it that the nodes refused, and why."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last update."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds spent per phase, in all."""

    @property
    def doing(self) -> str:
        """For people, e.g. "train of update 5 for 312 s"; with the last trouble, if there was any."""
        since_s = self.clock.monotonic_s() - self.phase_since_s
        now = f"{self.phase or 'between phases'} of update {self.update + 1} for {since_s:.0f} s"
        return (
            f"{now}; it went back to its checkpoint {self.num_attached} times: {self.last_error}"
            if self.last_error
            else now
        )

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the time inside towards `phase`."""
        assert phase in self.seconds, phase
        self.phase = phase
        start_s = self.phase_since_s = self.clock.monotonic_s()
        try:
            yield
        finally:
            self.seconds[phase] += self.clock.monotonic_s() - start_s
            self.phase = ""
