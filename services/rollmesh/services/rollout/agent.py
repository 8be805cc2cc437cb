"""The agent port. A user implements it to define how a model works on a task.

    class MyAgent(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            while True:
                turn = await env.generate()
                call = parse(turn.text)
                if call is None:
                    return
                result = await env.tool("calculator", call)
                env.observe(result)

The conversation of the task is already in the context when `run` begins. The environment records every token with its
log-prob, version and loss mask; an agent does not need to handle ids. The episode ends when `run` returns or reaches a
limit. `generate` raises a limit as `LimitReached`, which no agent needs to catch. Any other exception is a bug in the
agent: the episode is an infra failure with the traceback. It is retried and never scored 0.

An instance serves many episodes at once, so keep the state of an episode in local variables. Settings come from the
config's `options` as the class's own strict `Options` struct (msgspec), if it has one: `Agent(options=...)`; without
one, `Agent()`. A constructor with a parameter `base_dir` also gets the folder of the configuration.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from rollmesh.services.rollout.agent_types import LimitReached, Task, ToolResult, Turn
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.clients.generated import ScoredTokens
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.config.user_code import takes_arguments
from rollmesh.shared.errors import ConfigError

__all__ = ["AGENTS", "Agent", "Environment", "LimitReached", "ScoredTokens", "Task", "ToolResult", "Turn", "load_agent"]


class Agent(Plugin):
    """Base of agents: work on tasks with an environment. Constructed as the module describes."""

    @required
    async def run(self, task: Task, env: Environment) -> None:
        """Work on one task until it is finished."""


AGENTS = Registry(
    "agent",
    {
        "tool_calling": "rollmesh.services.rollout.agents.tool_calling:ToolCallingAgent",
        "single_turn": "rollmesh.services.rollout.agents.single_turn:SingleTurnAgent",
        "try_again": "rollmesh.services.rollout.agents.try_again:TryAgainAgent",
        "summarizing": "rollmesh.services.rollout.agents.summarizing:SummarizingAgent",
        "program": "rollmesh.services.rollout.agents.program:ProgramAgent",
        "url": "rollmesh.services.rollout.agents.url:UrlAgent",
    },
    Agent,
)


def load_agent(chosen: Extension, base_dir: str | Path | None = None) -> Agent:
    """Construct the chosen agent. Raise ConfigError."""
    takes = inspect.signature(AGENTS.find(chosen.name, base_dir)).parameters
    agent: Agent = AGENTS.make(chosen, base_dir, **({"base_dir": base_dir} if "base_dir" in takes else {}))
    if not inspect.iscoroutinefunction(agent.run) or not takes_arguments(agent.run, 2):
        raise ConfigError(
            f"agent `{chosen.name}` must have a method `async def run(self, task, env)`", name=chosen.name
        )
    return agent
