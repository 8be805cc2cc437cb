"""The scorer port: named rewards with the evidence they rest on.

Scorers are found by name, or loaded from a user's file as `file.py:Name`. What a scorer raises, a time limit it exceeds or a
return value that is no reward becomes an INFRA_FAILURE (see `engine`), so a scorer raises rather than guessing a 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.clients.hidden_tests import TestReport
from rollmesh.shared.registry import Registry
from rollmesh.shared.trajectory import Reward

ScorerResult = float | Reward | Sequence[Reward]
"""A bare number is one reward with neither evidence nor segment."""


class Scorer(Protocol):
    """Scores one sample at a time, concurrently with others.

    Constructed as `cls(options=...)`, where `options` is an instance of its class attribute `Options` (a msgspec struct,
    converted strictly from the configuration), or as `cls()` if it has none. Optional attributes: `version` (grows when the
    same input may score otherwise), `rewards` (names it gives besides the configured one), `use_sandbox` (see `UsesSandbox`),
    `async close()`.
    """

    async def score(self, item: ScoreItem) -> ScorerResult:
        """Rewards of one sample. An empty `Reward.name` stands for the name in the configuration."""


class Sandbox(Protocol):
    """Where hidden tests run: `rollmesh.shared.clients.sandbox.SandboxClient`, as far as scorers see it."""

    async def run_tests(
        self,
        files: Mapping[str, bytes],
        *,
        oracle_ref: str = "",
        manifest: str = "",
        limits: Mapping[str, float] | None = None,
        owner: str = "",
    ) -> TestReport:
        """Verdicts of hidden tests. Raises MeshError, never for what the candidate did."""


@runtime_checkable
class UsesSandbox(Protocol):
    """A scorer that asks sandbox nodes is given them before it scores."""

    def use_sandbox(self, sandbox: Sandbox) -> None:
        """Called once, if the service knows a way to sandbox nodes."""


SCORERS = Registry(
    "scorer",
    {
        "exact": "rollmesh.services.reward.scorers.exact:ExactScorer",
        "math": "rollmesh.services.reward.scorers.math:MathScorer",
        "format": "rollmesh.services.reward.scorers.format:FormatScorer",
        "length": "rollmesh.services.reward.scorers.length:LengthScorer",
        "tests": "rollmesh.services.reward.scorers.tests:TestsScorer",
    },
)
