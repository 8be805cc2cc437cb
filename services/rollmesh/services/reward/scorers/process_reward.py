"""Rewards of steps from a process reward model, bounded so that repeated steps earn nothing.

    r_k in [0, 1], k = 1..K: what the endpoint returns for step k
    clip    r'_k = min(r_k - eta, 0)
    delta   r'_k = r_k - r_(k+1) for k < K,  r'_K = r_K;  so the sum from step k is r_k
    clip_delta    delta of the clipped rewards: the sum from step k is min(r_k - eta, 0)

`raw` is r_k itself, of which a policy learns to repeat correct steps that do not help. With `steps: turns`, each turn
of the model is a step, and gets its reward. With `steps: paragraphs`, the steps are the paragraphs of its messages, and
the reward of the sample is the sum of r'_k. The last step, which states the answer, is not scored with
`score_last: false`, because the reward of success judges it. Add this reward to one of success by a weight.

The endpoint gets one request with all steps and returns a JSON list of K numbers. Any other answer is an infra failure.

Source: "On Designing Effective RL Reward at Training Time for LLM Reasoning" (2024-10, arXiv:2410.15115). eta and the
weight are not established; configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.judging import client_of, framed, is_score
from rollmesh.shared.config.settings import NonEmptyStr, Settings, Share
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, Reward
from rollmesh.shared.endpoints.answer import Asks

QUESTION = """\
Rate each step of a solution of a task.
{data}

Rate each step from 0 (wrong) to 1 (right). Return a JSON list of {num} numbers in the order of the steps, and nothing else."""  # noqa: E501
STEPS_MAX = 256
"""Maximum number of steps of a sample. More are not scored, which is an error of the run's limits."""
Form = Literal["raw", "clip", "delta", "clip_delta"]


class ProcessRewardOptions(Settings):
    """Settings of the process reward."""

    endpoint: NonEmptyStr = "process_reward_model"
    """Name of the process reward model in the table `endpoints`."""
    form: Form = "clip_delta"
    """The formula."""
    eta: Share = 0.5
    """Threshold of `clip`: a step with at least this reward costs nothing."""
    steps: Literal["turns", "paragraphs"] = "turns"
    """What a step is."""
    score_last: bool = True
    """Whether the last step is scored."""
    max_tokens: Annotated[int, Meta(ge=1)] = 2048
    """Token limit of the answer of the endpoint."""


class ProcessRewardScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = ProcessRewardOptions
    version = "1"

    def __init__(self, *, options: ProcessRewardOptions) -> None:
        self._options = options
        self._endpoints: Asks | None = None

    def use_endpoints(self, endpoints: Asks) -> None:
        self._endpoints = endpoints

    async def score(self, item: ScoreItem) -> Reward | Sequence[Reward]:
        by_turn = self._options.steps == "turns"
        steps = [(turn.segment, turn.text) for turn in item.turns] if by_turn else _paragraphs(item)
        if not self._options.score_last:
            steps = steps[:-1]
        if not steps:
            return not_applicable("the sample has no step to score")
        scores = await self._ask(item, [text for _, text in steps])
        refined = refine(scores, self._options.form, self._options.eta)
        if by_turn:
            return [
                Reward(name="", value=value, segment=segment, evidence=f"step {number}: {score:g}")
                for number, ((segment, _), value, score) in enumerate(zip(steps, refined, scores, strict=True), 1)
            ]
        shown = ", ".join(f"{score:g}" for score in scores)
        return Reward(name="", value=sum(refined), evidence=f"steps {shown}")

    async def _ask(self, item: ScoreItem, steps: Sequence[str]) -> list[float]:
        endpoints = client_of(self._endpoints, "process_reward", self._options.endpoint)
        if len(steps) > STEPS_MAX:
            raise ValueError(f"a sample must have at most {STEPS_MAX} steps, got {len(steps)}; lower `turns_max`")
        question = QUESTION.format(
            data=framed(
                task=item.task.messages[-1].content if item.task.messages else "",
                steps="\n".join(f"[{number}] {step}" for number, step in enumerate(steps, 1)),
            ),
            num=len(steps),
        )
        said = await endpoints.ask(
            self._options.endpoint, question, json=True, temperature=0.0, max_tokens=self._options.max_tokens
        )
        scores = said.value if isinstance(said.value, list) else []
        if len(scores) != len(steps) or not all(is_score(score) for score in scores):
            raise ValueError(
                f"the process reward model must return a JSON list of {len(steps)} numbers in [0, 1], got "
                f"{str(said.value)[:100]!r}"
            )
        return [float(score) for score in scores]


def refine(scores: Sequence[float], form: Form, eta: float) -> list[float]:
    """Return the rewards of the steps, r'_1 to r'_K."""
    clipped = [min(score - eta, 0.0) for score in scores] if form.startswith("clip") else list(scores)
    if not form.endswith("delta"):
        return clipped
    return [here - then for here, then in zip(clipped, [*clipped[1:], 0.0], strict=True)]


def _paragraphs(item: ScoreItem) -> list[tuple[int, str]]:
    return [(WHOLE_SAMPLE, text.strip()) for text in item.whole_response("episode").split("\n\n") if text.strip()]
