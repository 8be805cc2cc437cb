"""A toy duel for an opponent and a judge: which is the largest number? Tasks, agent and scorer in one file.

The policy writes a draft, sees the draft of the opponent, and writes its final answer. The judge compares this answer
with the draft of the opponent. Only the tokens of the policy are trained.
"""

import random
import re

from rollmesh.services.data.generated import Demonstration, GeneratedSource
from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.oracles import Oracle
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.rollout.agent import Agent
from rollmesh.shared.domain.trajectory import Reward

QUESTION = """\
Task: {task}
A: {mine}
B: {theirs}
How good is A compared with B? Return JSON: {{"score": NUMBER}}, from 0 (B is better) to 1 (A is better)."""


class LargestSource(GeneratedSource):
    """Tasks such as `Largest of 41 87 15`. A level is the number of numbers, minus 1."""

    name = "largest"
    hardest_level = 4

    def make(self, rng, level):
        return " ".join(str(rng.randint(10, 99)) for _ in range(level + 1))

    def prompt(self, key):
        return f"Largest of {key}"

    def demonstration(self, key):
        numbers = key.split()
        largest, theirs = max(numbers, key=int), random.Random(key).choice(numbers)
        return Demonstration(calls=((largest, theirs),), answer=largest)  # draft, draft of the opponent, answer


class LargestOracle(Oracle):
    """The answers of the tasks. They are for the reward `correct`, which is only recorded; the judge does not get
    them."""

    def resolve(self, rest):
        return AnswerKey(answers=(max(rest.split(), key=int),))


def draft_of(text):
    """Return a draft without the marks around it. The tiny model writes it as a tool call."""
    return re.sub(r"</?[a-z_]+>", "", text).strip()


class Duelist(Agent):
    """Writes a draft, asks the opponent for one, and writes the final answer."""

    async def run(self, task, env):
        await env.generate()
        theirs = await env.ask("opponent", task.messages, temperature=1.0, max_tokens=16)
        env.observe(draft_of(theirs.text))
        await env.generate()


class ComparedByJudge(Scorer):
    """The reward is the score of the judge."""

    def use_endpoints(self, endpoints):
        self.endpoints = endpoints

    async def score(self, item):
        first, *_ = item.turns
        if not first.observations:
            return 0.0  # a limit ended the episode before the opponent was asked
        question = QUESTION.format(
            task=item.task.messages[-1].content, mine=draft_of(item.response()), theirs=first.observations[0].text
        )
        said = await self.endpoints.ask("judge", question, json=True)
        return Reward(name="", value=float(said.value["score"]), evidence=said.text)
