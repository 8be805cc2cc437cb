"""Reward reasoning by the probability of the reference answer after it, flat where it is likely enough.

    p(y | x, z) = mean over the tokens of y of pi(y_t | x, z, y_<t)
    f(p) = min(p / (1 - range), 1),    R = f(p(y* | x, z)),    with `debias`: clip(R - f(p(y* | x)), 0, 1)

x is the prompt of the last turn, z is what the model wrote before its answer, and y* is the accepted answer in place of
the answer of the model, the best of several. pi is the policy with its current weights. Within `range` of certainty
the reward does not depend on how close the reasoning brings the model to the wording of the reference, so that other
answers are not punished.

Source: DARL (2026-01, arXiv:2601.14700), on the reward of RLPR (2025-06, arXiv:2506.18254). A review states that DARL
measures the deviation as max(p(y*) - p(y), 0), y the answer of the model. How the paper combines it with p(y*), and its
constants, could not be established, so the range is that of the catalog, and configuration. The probability of the
answer of the model is in the evidence. Deviation: the tokens of z are those that the model sampled if the tokens of its
answer are found among them, else those of the text.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Policy, Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, shorten
from rollmesh.shared.clients.generated import ScoredTokens
from rollmesh.shared.domain.trajectory import IntArray, Reward


class ReferenceProbOptions(AnswerOptions):
    """Settings of the reference-probability reward."""

    range: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    """Deviation of the probability from 1 within which the reward is 1."""
    debias: bool = False
    """Whether the same function of the probability of the reference directly after the prompt is subtracted, as in
    RLPR."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.where != "final":
            raise ValueError(
                f"`where` must be final, got {self.where!r}, because the answer in the last turn is replaced"
            )


class ReferenceProbScorer(Scorer):
    """See the module. It does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = ReferenceProbOptions
    version = "1"

    def __init__(self, *, options: ReferenceProbOptions) -> None:
        self._extractor = Extractor(options)
        self._options = options
        self._policy: Policy | None = None

    def use_policy(self, policy: Policy) -> None:
        self._policy = policy

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        found = self._extractor.find(item)
        if not found:
            return Reward(name="", value=0.0, evidence="no answer found")
        if self._policy is None:
            raise ValueError("the scorer reference_prob has no client of the policy; score samples of a run")
        keys = [self._policy.encode(answer) for answer in item.answer_key.answers]
        own = self._policy.encode(found)
        if not all(key.size for key in keys) or not own.size:
            raise ValueError("an answer has no tokens; correct the key of the task")
        prompt, reasoning = item.prompt_ids, self._reasoning(item, own, found)
        after = np.concatenate([prompt, reasoning])
        pairs = [(after, own), *((after, key) for key in keys), *((prompt, key) for key in keys)]
        if not self._options.debias:
            pairs = pairs[: 1 + len(keys)]
        scored = [mean_probability(one) for one in await self._policy.logprobs_of(pairs)]
        probabilities = scored[1 : 1 + len(keys)]
        best = int(np.argmax(probabilities))
        value = flat_within(probabilities[best], self._options.range)
        if self._options.debias:
            value = max(value - flat_within(scored[1 + len(keys) + best], self._options.range), 0.0)
        evidence = f"probability of the reference {probabilities[best]:.4f}, of the answer {scored[0]:.4f}"
        return Reward(name="", value=value, evidence=evidence, answer=shorten(found))

    def _reasoning(self, item: ScoreItem, own: IntArray, found: str) -> IntArray:
        """Return the tokens of the last turn before its answer."""
        assert self._policy is not None
        said = item.answer_ids
        for begin in range(said.size - own.size, -1, -1):
            if np.array_equal(said[begin : begin + own.size], own):
                return said[:begin]
        text = item.whole_response()
        return self._policy.encode(text[: text.rindex(found)])


def mean_probability(scored: ScoredTokens) -> float:
    """Return the mean of the probabilities of the tokens, in [0, 1]."""
    return float(np.exp(scored.logprobs.astype(np.float64)).mean())


def flat_within(probability: float, deviation: float) -> float:
    """Return the reward: 1 if the probability is at least 1 - deviation, and proportional to it below."""
    return min(probability / (1 - deviation), 1.0)
