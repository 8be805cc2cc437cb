"""A reward that only the environment of an episode knows, such as the score of a game.

The agent gives it with `Environment.reward`, the worker sends it with the episode, and a scorer that declares its name
turns it into a reward of the samples. A text of the model cannot contain one.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from rollmesh.shared.domain.trajectory import ROOT, WHOLE_SAMPLE

ENVIRONMENT_REWARDS_MAX = 1024
"""Most rewards that the environment of one episode gives."""
ENVIRONMENT_EVIDENCE_CHARS_MAX = 1024
"""Maximum length of the evidence of one of them. All of them are in one message with the episode."""


class EnvironmentReward(msgspec.Struct, frozen=True, kw_only=True):
    """One value. `rollmesh.shared.codec.checks.check_environment_reward` checks it."""

    name: str
    value: float
    segment: int = WHOLE_SAMPLE
    """Index of the last segment of the rewarded turn."""
    branch: int = ROOT
    """Index of the last action of the branch on which it was given: it belongs to all samples whose path contains this
    segment. ROOT: to all samples of the episode."""
    evidence: str = ""

    def of(self, path: Collection[int]) -> bool:
        """Return whether it belongs to the sample whose path has these segments."""
        return self.branch == ROOT or self.branch in path
