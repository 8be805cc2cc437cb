"""An agent that plays against an opponent, and a scorer that asks a judge."""

from __future__ import annotations

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.rollout.agent import Agent, Environment, Task
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.endpoints.answer import Asks


class PlaysOpponent(Agent):
    """Shows the move of the opponent to the model, then of the past policy, and takes two turns."""

    async def run(self, task: Task, env: Environment) -> None:
        for name in ("opponent", "past"):
            turn = await env.generate(max_tokens=8)
            answer = await env.ask(name, f"{task.messages[0].content} {turn.text}", temperature=1.0, max_tokens=6)
            env.observe(answer.text)


class Judge(Scorer):
    """The reward is the number that the judge returns."""

    def use_endpoints(self, endpoints: Asks) -> None:
        self._endpoints = endpoints

    async def score(self, item: ScoreItem) -> Reward:
        answer = await self._endpoints.ask(
            "judge", f"How good is this answer, from 0 to 1?\n{item.response()}", json=True
        )
        return Reward(name="", value=float(answer.value), evidence=answer.text)


class PlaysPast(Agent):
    """Shows the model what the policy said at a past step, greedily, and takes two turns."""

    async def run(self, task: Task, env: Environment) -> None:
        await env.generate(max_tokens=8)
        answer = await env.ask("past", task.messages, temperature=0.0, max_tokens=6)
        env.observe(answer.text)
        await env.generate(max_tokens=8)


class Characters(Scorer):
    """The reward is the number of characters of the last turn, so that random weights get a gradient."""

    async def score(self, item: ScoreItem) -> float:
        return float(len(item.response()))
