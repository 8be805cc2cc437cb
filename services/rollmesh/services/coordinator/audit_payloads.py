"""Payload references: every scored episode has its own payload in the sample stream."""

from __future__ import annotations

from rollmesh.services.coordinator.audit_report import Complain
from rollmesh.services.coordinator.core import facts as f


class Payloads:
    """Where the payloads of a run are. `complain` receives references that cannot be."""

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self._episodes: dict[int, str] = {}
        """Scored episode by the sequence of its payload."""

    def enter(self, fact: f.Fact) -> None:
        """Take note of one fact."""
        if not isinstance(fact, f.EpisodeScored):
            return
        sequence = fact.payload.sequence
        if sequence < 1:
            self._complain("payloads", f"episode {fact.episode} was scored without a payload")
            return
        first = self._episodes.setdefault(sequence, fact.episode)
        if first != fact.episode:
            self._complain(
                "payloads", f"episode {fact.episode} has payload {sequence}, which is that of episode {first}"
            )
