"""An agent of one's own: lets the model call the calculator, and asks once more after neither call nor answer."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.rollout.agent import Task
from rollmesh.services.rollout.environment import Environment


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings, from `rollout.agent.options`."""

    calls_max: int = 6
    """Calculator calls before the agent gives up."""
    reminder: str = "?"
    """What the model is told after a turn that was neither a call nor an answer."""


class Agent:
    """One instance serves many episodes at once: what belongs to an episode stays in local variables."""

    Options: ClassVar[type[msgspec.Struct]] = AgentOptions

    def __init__(self, *, options: AgentOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        calls, reminded = 0, False
        while calls <= self._options.calls_max:
            said = (await env.generate()).text
            call = _between(said, "<tool_call>", "</tool_call>")
            if call is not None:
                calls += 1
                result = await env.tool("calculator", call)
                env.observe(result.text)
            elif "</answer>" in said or reminded:
                return
            else:
                reminded = True
                env.observe(self._options.reminder)


def _between(text: str, begin: str, end: str) -> str | None:
    _, found, rest = text.rpartition(begin)
    inner, closed, _ = rest.partition(end)
    return inner if found and closed else None
