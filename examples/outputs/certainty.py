"""Two scorers that read the engine's outputs: how certain each token was, and how much the answer depends on the
prompt."""

from typing import ClassVar

import msgspec
import numpy as np

from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.domain.trajectory import Message, Reward


class Certainty(Scorer):
    """The mean distance of the two most likely tokens, in nats, and the negative mean entropy of the last turn."""

    columns = ("entropy", "top_k_logprobs")  # arrays of `rollout.outputs`; `logprobs` is always there
    rewards = ("low_entropy",)

    class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        margin_max: float = 10.0
        """Largest distance, in nats. A place of `top_k` without a token has the log-prob -1e30."""

    def __init__(self, *, options):
        self.margin_max = options.margin_max

    async def score(self, item):
        top = item.column("top_k_logprobs", "final")  # [n, k], the most likely token first
        margin = np.minimum(top[:, 0] - top[:, 1], self.margin_max).mean()
        entropy = item.column("entropy", "final").mean()
        return [Reward(name="", value=float(margin)), Reward(name="low_entropy", value=-float(entropy))]


class Dependence(Scorer):
    """The mean log-prob of the answer after its prompt, less that after another prompt. It is high for an answer to
    this question only."""

    other: ClassVar = [Message(role="user", content="Answer any question.")]

    def use_policy(self, policy):
        self.policy = policy

    async def score(self, item):
        answer = item.answer_ids
        pairs = [(item.prompt_ids, answer), (self.other, answer)]
        here, there = await self.policy.logprobs_of(pairs)  # both under one version of the weights
        value = float(here.logprobs.mean() - there.logprobs.mean())
        return Reward(name="", value=value, evidence=f"step {here.version.step}")
