"""One turn: the model answers the question."""

from rollmesh.services.rollout import agent
from rollmesh.services.rollout.agent import Environment, Task


class Agent(agent.Agent):
    async def run(self, task: Task, env: Environment) -> None:
        await env.generate()
