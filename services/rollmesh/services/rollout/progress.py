"""Count the episodes of a worker since its start, for the node's report and for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollmesh.services.rollout.failures import EpisodeFailed
from rollmesh.shared.domain.trajectory import Episode, FinishReason, Role


@dataclass(slots=True)
class WorkerProgress:
    """Counters with the invariant: leased = completed + failed + cancelled + lost + running."""

    num_leased: int = 0
    num_completed: int = 0
    num_failed: int = 0
    """Infra failures."""
    num_cancelled: int = 0
    """Cancelled episodes whose leases were released."""
    num_lost: int = 0
    """Leases that were gone before their episode ended, or whose report was rejected."""
    num_turns: int = 0
    num_tokens: int = 0
    """Sampled tokens of completed episodes."""
    stage_s: Counter[str] = field(default_factory=Counter)
    """Seconds per stage over completed episodes."""
    failures: Counter[str] = field(default_factory=Counter)
    """Infra failures by boundary."""
    last_failure: str = ""

    def add_tokens(self, episode: Episode) -> None:
        """Add the turns, tokens and seconds of a completed episode."""
        actions = [segment for segment in episode.segments if segment.role is Role.ACTION]
        self.num_turns += sum(segment.finish is not FinishReason.UNFINISHED for segment in actions)
        self.num_tokens += sum(segment.num_tokens for segment in actions)
        self.stage_s.update(episode.stage_s)

    def record_failure(self, err: EpisodeFailed) -> None:
        self.failures[err.where] += 1
        self.last_failure = str(err)
