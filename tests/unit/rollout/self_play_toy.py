"""A toy of search self-play: the real agent, scorer and estimator, with a table of a few logits as the policy.

The proposer writes one of six questions, whose level is its first word, or one that cannot be answered. A solver is
right with the probability of its skill at the level. Skills and choices of the proposer are the logits of one policy.

`python -m tests.unit.rollout.self_play_toy` compares it with a proposer that is not trained (benchmarks/README.md).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean, stdev

import numpy as np

from rollmesh.services.reward.config import RewardConfig, ScorerConfig, build_engine
from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.clients.generated import Target
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    EpisodeKey,
    GroupContext,
    IntArray,
    MemberOutcome,
    Reward,
    SampleSummary,
    SamplingParams,
)
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.estimators import make_estimator

from .scored_items import items_of
from .table_policy import END, TableGenerator, TableStream

LEVELS = "012345"
UNANSWERABLE = "u"
START = (2.0, 1.2, 0.4, -0.4, -1.2, -2.0)
"""Logits of a right answer at each level."""
FORM = {"endpoint": "", "num_solvers": 5, "chars_min": 1, "words_min": 1, "searches_min": 1}
"""Options of the agent: a question is one character after one call."""


class PromptTable(TableGenerator):
    """A table that also reads the prompt."""

    prompt = ""

    def open(
        self, token_ids: IntArray, params: SamplingParams, *, target: Target, session: str, key: EpisodeKey
    ) -> TableStream:
        self.prompt = self._tokenizer.decode(token_ids)
        return super().open(token_ids, params, target=target, session=session, key=key)


class SelfPlayToy:
    """The policy, and one update of it. With `fixed`, the proposer keeps drawing all questions alike."""

    def __init__(self, *, seed: int, fixed: bool = False, lr: float = 1.0) -> None:
        self.seed, self.fixed, self.lr = seed, fixed, lr
        self.choices = dict.fromkeys(LEVELS + UNANSWERABLE, 0.0)
        self.skills = dict(zip(LEVELS, START, strict=True))
        self._engine = build_engine(
            RewardConfig(
                scorers=(
                    ScorerConfig(name="exact", reward="correct"),
                    ScorerConfig(name="self_play", reward="played"),
                )
            )
        )
        self._estimator = make_estimator(
            Extension("roles", {"scope": "none", "scopes": {"solver": "episode"}}), {"played": 1.0}
        )

    def chosen(self) -> Mapping[str, float]:
        """Return the probabilities of the proposer's questions."""
        logits = np.array(list(self.choices.values()))
        p = np.exp(logits - logits.max())
        return dict(zip(self.choices, (p / p.sum()).tolist(), strict=True))

    def skill(self, level: str) -> float:
        """Return the probability of a right answer."""
        return float(1 / (1 + np.exp(-self.skills[level])))

    @property
    def accuracy(self) -> float:
        """Mean skill over all levels."""
        return float(np.mean([self.skill(level) for level in LEVELS]))

    async def update(self, number: int, num_episodes: int = 8) -> float:
        """Play episodes, each its own group, and take one step of policy gradient. Return the share of right
        solvers."""
        mesh = LocalMesh(
            script=lambda text: "",
            functions={"call": lambda text: f"result of {text}"},
            config=RolloutConfig(limits=LimitsConfig(turns_max=64, tokens_max=4096)),
            rewards=lambda text: (Reward(name="correct", value=float(text == "<answer>r</answer>")),),
            private_extras={"answer": "r."},
        )
        table = PromptTable(mesh.tokenizer, lambda answer: self._table(answer, table.prompt))
        mesh.generator = table  # type: ignore[assignment]
        agent = load_agent(Extension("search_self_play", FORM))
        for episode in range(num_episodes):
            given = lease(
                messages=["ask"],
                tools=["calculator"],
                lease_id=f"{self.seed}-{number}-{episode}",
                seed=hash((self.seed, number, episode)) & 0xFFFFFFFF,
            )
            report = await mesh.runner(agent).run(given)
            assert not report.failure.message, report.failure
        gradient: dict[tuple[str, str], float] = defaultdict(float)
        solved: list[float] = []
        requests = [request for request in mesh.scorer.items if any(s.role for s in request.samples)]
        for request in requests:
            items = items_of(request, answers=("r",))
            scored = await self._engine.score(items)
            members = tuple(
                MemberOutcome(
                    sample_id=sample.sample_id,
                    episode=item.key.episode,
                    end="ready",
                    rewards=tuple(rewards),
                    summary=SampleSummary(role=item.role),
                )
                for sample, item, rewards in zip(request.samples, items, scored, strict=True)
            )
            advantages = self._estimator.of_group(GroupContext(group="g", task="t", members=members))
            for item, member in zip(items, members, strict=True):
                said, advantage = item.response(), advantages[member.sample_id]
                if item.role == "proposer":
                    asked = said.partition("<question>")[2][:1]
                    for name, p in self.chosen().items():
                        gradient["choice", name] += advantage * (float(name == asked) - p)
                else:
                    level = item.messages[0].content[0]
                    right = said == "<answer>r</answer>"
                    solved.append(float(right))
                    gradient["skill", level] += advantage * (float(right) - self.skill(level)) / 5
        for (kind, name), value in gradient.items():
            if kind == "skill":
                self.skills[name] += self.lr * value / num_episodes
            elif not self.fixed:
                self.choices[name] += self.lr * value / num_episodes
        return float(np.mean(solved)) if solved else 0.0

    def _table(self, turn: str, prompt: str) -> Mapping[str, float]:
        """Return the distribution of the next token of a turn."""
        context = prompt.partition("<|user|>")[2].partition(END)[0]
        if context == "ask":
            if "<|tool|>" not in prompt:
                return _next(turn, f"<tool_call>1</tool_call>{END}")
            return self.chosen() if turn == "<question>" else _next(turn, f"<question>{turn[10:11]}</question>{END}")
        if turn != "<answer>":
            return _next(turn, f"<answer>{turn[8:9]}</answer>{END}")
        if context.startswith("[Documents]"):
            return {"w" if context.split("\n\n")[1] == UNANSWERABLE else "r": 1.0}
        skill = self.skill(context[0])
        return {"r": skill, "w": 1 - skill}


def _next(turn: str, whole: str) -> Mapping[str, float]:
    """Return the next token of `whole`, which begins with the turn."""
    rest = whole.removeprefix(turn)
    return {rest[: rest.index(">") + 1] if rest.startswith("<") else rest[0]: 1.0}


async def trained(seed: int, *, fixed: bool, updates: int = 20) -> SelfPlayToy:
    """Return a toy after `updates` updates of 8 questions."""
    toy = SelfPlayToy(seed=seed, fixed=fixed)
    for number in range(updates):
        await toy.update(number)
    return toy


if __name__ == "__main__":
    differences = list[float]()
    for seed in range(10):
        played, uniform = [asyncio.run(trained(seed, fixed=fixed)) for fixed in (False, True)]
        differences.append(played.accuracy - uniform.accuracy)
        print(
            f"seed {seed}: accuracy {played.accuracy:.3f}, with a uniform proposer {uniform.accuracy:.3f}; the proposer "
            f"asks the hardest level {played.chosen()[LEVELS[-1]]:.2f}, the unanswerable {played.chosen()[UNANSWERABLE]:.2f}"
        )
    print(f"difference {fmean(differences):+.3f} ± {stdev(differences) / len(differences) ** 0.5:.3f}")
