"""The scorer port: computes named rewards with their evidence.

Scorers are found by name, or loaded from user code as `file.py:Name`. A scorer may read the rewards of others
(`reads`), which run before it, and its reward may be `not_applicable` to a sample. An exception, a timeout or a return
value that is not a reward becomes an INFRA_FAILURE (see `scorer_run`), so a scorer raises instead of returning a
guessed 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.clients.generated import ScoredTokens
from rollmesh.shared.clients.given_tokens import Prompt
from rollmesh.shared.clients.hidden_tests import TestReport
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.domain.trajectory import IntArray, Outcome, Reward
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.endpoints.answer import Asks

Sees = Literal["path", "episode"]
ScorerResult = float | Reward | Sequence[Reward]
"""A number is one reward without evidence and segment."""


def not_applicable(cause: str) -> Reward:
    """Return the reward of a scorer that says nothing about a sample. The sample keeps its other rewards, and this one
    enters no mean and no deviation."""
    return Reward(name="", value=0.0, evidence=cause, outcome=Outcome.NOT_APPLICABLE)


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


class Scorer(Plugin):
    """Base of scorers. Calls are concurrent. Constructed as `cls(options=...)`, or as `cls()` if the class has no
    `Options`."""

    version: str = "1"
    """Changes when the same input may score differently."""
    rewards: tuple[str, ...] = ()
    """Names of its rewards besides the configured one."""
    diagnostics: tuple[str, ...] = ()
    """Names in `rewards` that describe a sample and do not judge it. A run with one of them MUST set `reward.weights`,
    because without weights every reward has weight 1."""
    reads: tuple[str, ...] = ()
    """Names of rewards of other scorers, which run before it. They are in `item.rewards`; see `item.reward`."""
    reads_of_task: bool = False
    """Whether it reads only those of `reads` that the task names, if it names any. The others are not applicable."""
    columns: tuple[str, ...] = ()
    """Names of the per-token arrays of `JudgedSegment.arrays` that it reads: "logprobs", or arrays of
    `rollout.outputs`."""
    environment_rewards: tuple[str, ...] = ()
    """Names of the rewards of `ScoreItem.environment` that it reads. An episode with another one is rejected."""

    @required
    async def score(self, item: ScoreItem) -> ScorerResult:
        """Return the rewards of one sample. An empty `Reward.name` means the name in the configuration."""
        raise NotImplementedError

    def use_reward_name(self, name: str) -> None:
        """Store the name of its reward in the configuration, before the first sample."""

    def use_timeout(self, timeout_s: float) -> None:
        """Store `timeout_s` of its entry, before the first sample. A scorer with this method limits its own calls
        instead of the engine, because a slow answer is a wrong answer for it."""

    def use_sandbox(self, sandbox: Sandbox) -> None:
        """Store the client of sandbox nodes. Called once before the first sample, if the service has one."""

    def use_policy(self, policy: Policy) -> None:
        """Store the client of the policy. Called once before the first sample, if the service has one. The service
        starts it if some scorer has this method."""

    def use_endpoints(self, endpoints: Asks) -> None:
        """Store the client of endpoints, such as a judge. Called once before the first sample, if the service has one.

        What the scorer asks during `score` is stored with the episode of the sample. A failure that it does not catch
        is an infra failure.
        """

    async def close(self) -> None:
        """Release resources, such as worker processes."""


class BatchScorer(Scorer):
    """Base of scorers that score several samples in one call."""

    sees: Sees = "path"
    """`path`: each sample is scored by itself, and a call has any samples, at most `batch_max` of its entry. `episode`:
    a call has all samples of one episode, so that they can share a reward."""

    async def score(self, item: ScoreItem) -> ScorerResult:
        (result,) = await self.score_batch([item])
        return result

    @required
    async def score_batch(self, items: Sequence[ScoreItem]) -> Sequence[ScorerResult]:
        """Return the rewards of each sample, in order. If the call raises, all its samples are infra failures."""
        raise NotImplementedError


SCORERS = Registry(
    "scorer",
    {
        "exact": "rollmesh.services.reward.scorers.exact:ExactScorer",
        "math": "rollmesh.services.reward.scorers.math:MathScorer",
        "format": "rollmesh.services.reward.scorers.format:FormatScorer",
        "length": "rollmesh.services.reward.scorers.length:LengthScorer",
        "turn_success": "rollmesh.services.reward.scorers.turn_success:TurnSuccessScorer",
        "try_again": "rollmesh.services.reward.scorers.try_again:TryAgainScorer",
        "outcome": "rollmesh.services.reward.scorers.outcome:OutcomeScorer",
        "first": "rollmesh.services.reward.scorers.first:FirstScorer",
        "diversity": "rollmesh.services.reward.scorers.diversity:DiversityScorer",
        "self_play": "rollmesh.services.reward.scorers.self_play:SelfPlayScorer",
        "routing": "rollmesh.services.reward.scorers.routing:RoutingScorer",
        "control": "rollmesh.services.reward.scorers.control:ControlScorer",
        "turn_answer": "rollmesh.services.reward.scorers.turn_answer:TurnAnswerScorer",
        "flawed_positives": "rollmesh.services.reward.scorers.flawed_positives:FlawedPositivesScorer",
        "reward_ensemble": "rollmesh.services.reward.scorers.reward_ensemble:RewardEnsembleScorer",
        "tests": "rollmesh.services.reward.scorers.tests:TestsScorer",
        "improvement": "rollmesh.services.reward.scorers.improvement:ImprovementScorer",
        "environment": "rollmesh.services.reward.scorers.environment:EnvironmentScorer",
        "squad": "rollmesh.services.reward.scorers.squad:SquadScorer",
        "choice": "rollmesh.services.reward.scorers.choice:ChoiceScorer",
        "regex": "rollmesh.services.reward.scorers.regex:RegexScorer",
        "json_schema": "rollmesh.services.reward.scorers.json_schema:JsonSchemaScorer",
        "ngram": "rollmesh.services.reward.scorers.ngram:NgramScorer",
        "repetition": "rollmesh.services.reward.scorers.repetition:RepetitionScorer",
        "rubric": "rollmesh.services.reward.scorers.rubric:RubricScorer",
        "search_answer": "rollmesh.services.reward.scorers.search_answer:SearchAnswerScorer",
        "progress": "rollmesh.services.reward.scorers.progress:ProgressScorer",
        "reference_prob": "rollmesh.services.reward.scorers.reference_prob:ReferenceProbScorer",
        "process_reward": "rollmesh.services.reward.scorers.process_reward:ProcessRewardScorer",
        "consistent": "rollmesh.services.reward.scorers.consistent:ConsistentScorer",
    },
    Scorer,
)
