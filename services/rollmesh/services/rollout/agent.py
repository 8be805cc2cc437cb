"""The agent protocol: what a user writes to say how a model works on a task.

    class Agent:
        async def run(self, task: Task, env: Environment) -> None:
            while True:
                turn = await env.generate()
                call = parse(turn.text)
                if call is None:
                    return
                result = await env.tool("calculator", call)
                env.observe(result.text)

The conversation of the task is already in the context when `run` begins. The environment records every token with its log-prob,
version and loss mask; an agent sees ids only if it wants to. Returning ends the episode; so does a limit, which `generate` raises
as `LimitReached` and no agent needs to catch. Any other exception is a bug in the agent: the episode is an infra failure with the
traceback, retried, and never scored 0.

An instance serves many episodes at once: keep what belongs to an episode in local variables. Settings come from the config's
`options` as the class's own strict `Options` struct (msgspec), if it has one: `Agent(options=...)`; without one, `Agent()`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Protocol

from rollmesh.services.rollout.agent_types import LimitReached, Task, ToolResult, Turn
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.registry import Extension, Registry

__all__ = ["AGENTS", "Agent", "Environment", "LimitReached", "Task", "ToolResult", "Turn", "load_agent"]

AGENTS = Registry(
    "agent",
    {
        "tool_calling": "rollmesh.services.rollout.agents.tool_calling:ToolCallingAgent",
        "single_turn": "rollmesh.services.rollout.agents.single_turn:SingleTurnAgent",
    },
)


class Agent(Protocol):
    """One way of working on tasks."""

    async def run(self, task: Task, env: Environment) -> None:
        """Works on one task until it is done."""
        ...


def load_agent(chosen: Extension, base_dir: str | Path | None = None) -> Agent:
    """Construct the chosen agent. Raise ConfigError."""
    agent = AGENTS.make(chosen, base_dir)
    if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
        raise ConfigError(
            f"agent `{chosen.name}` must have a method `async def run(self, task, env)`", name=chosen.name
        )
    made: Agent = agent
    return made
