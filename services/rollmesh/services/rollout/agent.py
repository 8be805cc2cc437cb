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
`agent_options` as the class's own strict `Options` struct (msgspec), if it has one: `Agent(options=...)`; without one, `Agent()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.registry import Registry
from rollmesh.shared.trajectory import FinishReason, IntArray, Message

if TYPE_CHECKING:
    from rollmesh.services.rollout.environment import Environment

AGENTS = Registry(
    "agent",
    {
        "tool_calling": "rollmesh.services.rollout.agents.tool_calling:ToolCallingAgent",
        "single_turn": "rollmesh.services.rollout.agents.single_turn:SingleTurnAgent",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent may know of its task; the answer key is not among it."""

    task_id: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model said."""

    text: str
    """With its stop string, and tags as text."""
    finish: FinishReason
    """STOP, or LENGTH if the turn's own token limit cut it."""
    token_ids: IntArray
    """[n] int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool answered."""

    text: str
    """For the model: output and value, or one line that says what went wrong."""
    ok: bool
    """False if the call was wrong or hit a limit inside the sandbox: the model's doing."""


class LimitReached(Exception):
    """The episode has used up one of its limits; `limit` names it. The episode ends and counts as the model's doing."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"the episode reached its limit of {limit}")
        self.limit = limit


class Agent(Protocol):
    """One way of working on tasks."""

    async def run(self, task: Task, env: Environment) -> None:
        """Works on one task until it is done."""
        ...


def load_agent(name: str, options: Mapping[str, Any], base_dir: str | Path | None = None) -> Agent:
    """The agent called `name` in the config, made with its options. Raises `ConfigError`."""
    agent = AGENTS.make(name, options, base_dir)
    if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
        raise ConfigError(f"agent `{name}` must have a method `async def run(self, task, env)`", name=name)
    made: Agent = agent
    return made
