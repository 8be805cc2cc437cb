"""An agent with fixed turns and tool calls, because the fake engine generates noise without calls."""

from __future__ import annotations

from rollmesh.services.rollout.agent import Agent, Environment, Task

NUM_CALLS = 2


class SeveralTurns(Agent):
    """Calls the calculator between its turns."""

    async def run(self, task: Task, env: Environment) -> None:
        for _ in range(NUM_CALLS):
            turn = await env.generate()
            result = await env.tool("calculator", f"{len(turn.text)}+1")
            env.observe(result)
        await env.generate()
