"""A custom agent. The model may call the calculator, and gets one reminder if a turn is neither a call nor an
answer."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.rollout import agent
from rollmesh.services.rollout.agent import Environment, Task


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings, from `rollout.agent.options`."""

    calls_max: int = 6
    """Maximum number of calculator calls."""
    reminder: str = "?"
    """Observation after a turn that is neither a call nor an answer."""


class Agent(agent.Agent):
    """One instance serves many episodes at once, so keep the state of an episode in local variables."""

    Options: ClassVar[type[msgspec.Struct]] = AgentOptions

    def __init__(self, *, options: AgentOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        calls, reminded = 0, False
        while calls <= self._options.calls_max:
            text = (await env.generate()).text
            call = _between(text, "<tool_call>", "</tool_call>")
            if call is not None:
                calls += 1
                result = await env.tool("calculator", call)
                env.observe(result.text)
            elif "</answer>" in text or reminded:
                return
            else:
                reminded = True
                env.observe(self._options.reminder)


def _between(text: str, begin: str, end: str) -> str | None:
    _, found, rest = text.rpartition(begin)
    inner, closed, _ = rest.partition(end)
    return inner if found and closed else None
