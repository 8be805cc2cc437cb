"""The agent without tools. It generates one turn."""

from __future__ import annotations

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.environment import Environment


class SingleTurnAgent(Agent):
    """Let the model answer once."""

    async def run(self, task: Task, env: Environment) -> None:
        await env.generate()
