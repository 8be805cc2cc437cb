"""Agents of the tasks of `python -m benchmarks methods`."""

from __future__ import annotations

import random

from rollmesh.demo.families.calc import demonstrate
from rollmesh.services.rollout.agent import Task
from rollmesh.services.rollout.agents.prefix import PrefixAgent
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.domain.trajectory import Purpose, Role, Source


class FirstGiven(ToolCallingAgent):
    """Episode 0 of a training group is the ideal episode of its calculator task, given and not sampled. The model plays
    the others."""

    async def run(self, task: Task, env: Environment) -> None:
        if env.purpose is not Purpose.TRAIN or env.index:
            await super().run(task, env)
            return
        shown = demonstrate(task.messages[-1].content)
        for call, result in shown.calls:
            _give(env, f"<tool_call>{call}</tool_call>")
            env.observe(result)
        _give(env, f"<answer>{shown.answer}</answer>")


class FirstTurnsGiven(PrefixAgent):
    """The agent `prefix` for calculator tasks: a solution is all turns of the ideal episode, and its parts are their
    tokens. The last turn that is given may be incomplete."""

    private_extras = ()

    def give(self, task: Task, env: Environment, rng: random.Random) -> str:
        shown = demonstrate(task.messages[-1].content)
        turns = [*((f"<tool_call>{call}</tool_call>", result) for call, result in shown.calls)]
        answer = f"<answer>{shown.answer}</answer>"
        sizes = [env.encode(text, end=True, markup=True).size for text in (*(text for text, _ in turns), answer)]
        left = self.length(rng, sum(sizes))
        for (text, result), size in zip(turns, sizes, strict=False):
            if left < size:
                break
            _give(env, text, train=False)
            env.observe(result)
            left -= size
        else:
            text = answer
        given = env.encode(text, end=True, markup=True)[:left]
        if not given.size:
            return ""
        env.append(given, role=Role.ACTION, source=Source.DATASET)
        return env.decode(given)


def _give(env: Environment, text: str, *, train: bool = True) -> None:
    env.append(env.encode(text, end=True, markup=True), role=Role.ACTION, source=Source.DATASET, train=train)
