"""The scorer port: computes named rewards with their evidence.

Scorers are found by name, or loaded from user code as `file.py:Name`. An exception, a timeout or a return value that is
not a reward becomes an INFRA_FAILURE (see `engine`), so a scorer raises instead of returning a guessed 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.clients.generated import ScoredTokens
from rollmesh.shared.clients.given_tokens import Prompt
from rollmesh.shared.clients.hidden_tests import TestReport
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.domain.trajectory import IntArray, Reward
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.endpoints.answer import Asks

ScorerResult = float | Reward | Sequence[Reward]
"""A number is one reward without evidence and segment."""


class Scorer(Protocol):
    """Scores samples. Calls are concurrent.

    A class that implements it is constructed as `cls(options=...)`, or as `cls()` if it has no class attribute `Options`. Optional
    attributes: `version` (changes when the same input may score differently), `rewards` (names of its rewards besides the configured
    one), `columns` (names of the per-token arrays that it reads from `JudgedSegment.arrays`: "logprobs", or arrays of `rollout.outputs`),
    `use_sandbox` (see `UsesSandbox`), `use_policy` (see `UsesPolicy`), `use_endpoints` (see `UsesEndpoints`), `async close()`.
    """

    async def score(self, item: ScoreItem) -> ScorerResult:
        """Return the rewards of one sample. An empty `Reward.name` means the name in the configuration."""


class Sandbox(Protocol):
    """The part of `rollmesh.shared.clients.sandbox.SandboxClient` that scorers use to run hidden tests."""

    async def run_tests(
        self,
        files: Mapping[str, bytes],
        *,
        oracle_ref: str = "",
        manifest: str = "",
        limits: Mapping[str, float] | None = None,
        owner: str = "",
        budget_s: float = 0.0,
    ) -> TestReport:
        """Return the verdicts of hidden tests. Raise MeshError, but never because of the candidate."""


@runtime_checkable
class LimitsItself(Protocol):
    """A scorer for which a slow answer is a wrong answer. It limits its own calls instead of the engine."""

    def use_timeout(self, timeout_s: float) -> None:
        """Store `timeout_s` of its entry. Called once, before the first call of `score`."""


@runtime_checkable
class UsesSandbox(Protocol):
    """A scorer that calls sandbox nodes. It gets their client before the first call of `score`."""

    def use_sandbox(self, sandbox: Sandbox) -> None:
        """Store the client. Called once, if the service has one."""


class Policy(Protocol):
    """Log-probs of given tokens under the weights that the inference nodes serve.

    `under` is the prompt before the tokens: token ids [n], or messages, which the chat template encodes. The weights
    are the current ones, or exactly those of a `step` of the first incarnation or of a version. All errors are those of
    `InferenceRouter.score`; a scorer that does not catch them fails as an infra failure.
    """

    async def logprobs(
        self,
        token_ids: Sequence[int] | IntArray,
        *,
        under: Prompt,
        step: int | PolicyVersion | None = None,
        outputs: Sequence[str] = (),
    ) -> ScoredTokens:
        """Return log-probs, and arrays of `outputs`, of the given tokens [n], n >= 1, under the plain softmax."""

    async def logprobs_of(
        self,
        pairs: Sequence[tuple[Prompt, Sequence[int] | IntArray]],
        *,
        step: int | PolicyVersion | None = None,
        outputs: Sequence[str] = (),
    ) -> list[ScoredTokens]:
        """Return the same for several pairs of prompt and tokens, all under one version."""

    def encode(self, text: str) -> IntArray:
        """Return the tokens of a text without special tokens, [n] int32."""


@runtime_checkable
class UsesPolicy(Protocol):
    """A scorer that asks the policy. It gets the client before the first call of `score`."""

    def use_policy(self, policy: Policy) -> None:
        """Store the client. Called once, if the service has one."""


@runtime_checkable
class UsesEndpoints(Protocol):
    """A scorer that asks endpoints, such as a judge. It gets their client before the first call of `score`.

    What it asks during `score` is stored with the episode of the sample. A failure that it does not catch is an infra failure.
    """

    def use_endpoints(self, endpoints: Asks) -> None:
        """Store the client. Called once, if the service has one."""


SCORERS = Registry(
    "scorer",
    {
        "exact": "rollmesh.services.reward.scorers.exact:ExactScorer",
        "math": "rollmesh.services.reward.scorers.math:MathScorer",
        "format": "rollmesh.services.reward.scorers.format:FormatScorer",
        "length": "rollmesh.services.reward.scorers.length:LengthScorer",
        "turn_success": "rollmesh.services.reward.scorers.turn_success:TurnSuccessScorer",
        "tests": "rollmesh.services.reward.scorers.tests:TestsScorer",
    },
)
