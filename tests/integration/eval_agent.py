"""An agent that waits in evaluation episodes, so that an evaluation lasts as long as a test needs."""

from __future__ import annotations

import asyncio

from rollmesh.services.rollout.agent import Agent, Environment, Task

resume = asyncio.Event()
"""Lets the evaluation episodes continue. A test sets a new one."""


class WaitsInEvaluation(Agent):
    """Takes two turns, and waits between them if its episode must use exactly one step."""

    async def run(self, task: Task, env: Environment) -> None:
        await env.generate()
        if env._state.target.exact:
            await resume.wait()
        env.observe("and")
        await env.generate()
