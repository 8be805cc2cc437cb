"""The variant of an episode at a worker: its agent, its texts, and the permission to read private extras for them.

The worker applies a variant, so that every agent works in a group with a plan: sampling, the role of samples, a hint at
the end of the prompt and the beginning of the first answer. An agent may also read `env.variant`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from rollmesh.services.rollout.agent import Agent, known_agents, load_agent
from rollmesh.services.rollout.agent_types import Task
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.services.rollout.private_extras import PrivateExtras
from rollmesh.shared.domain.plans import Variant
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.errors import ConfigError, InvalidInput, NotFound, PermissionDenied

AGENTS_KEPT_MAX = 256
"""Most agents with the options of a variant that a worker keeps. The least recently used one is dropped."""


class VariantAgents:
    """The agents of a worker, with the options of variants in place of theirs."""

    def __init__(self, config: RolloutConfig, agents: Mapping[str, Agent], base_dir: str | Path | None = None) -> None:
        self._config = config
        self._agents = agents
        self._base_dir = base_dir
        self._made: OrderedDict[tuple[str, str], Agent] = OrderedDict()

    def of(self, name: str, variant: Variant) -> Agent:
        """Return the agent `name` of `rollout.agents` (empty: the default agent) with the options of a variant. Raise
        NotFound, or InvalidInput for options that it does not have, or a prefix that it cannot continue."""
        if name not in self._agents:
            raise NotFound(
                f"agent `{name}` of the variant `{variant.name}` is not configured; "
                f"{known_agents(self._agents, 'the plan')}"
            )
        check_prefix(self._agents[name], variant)
        if not variant.options:
            return self._agents[name]
        key = name, json.dumps(variant.options, sort_keys=True)
        if key not in self._made:
            self._made[key] = agent_with(self._config, name, variant, self._base_dir)
            if len(self._made) > AGENTS_KEPT_MAX:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]


def agent_with(config: RolloutConfig, name: str, variant: Variant, base_dir: str | Path | None) -> Agent:
    """Construct an agent with the options of a variant in place of those that are configured. Raise InvalidInput."""
    chosen = config.agents_by_name[name]
    try:
        return load_agent(replace(chosen, options={**chosen.options, **variant.options}), base_dir)
    except ConfigError as error:
        agent = name or config.agent.name
        raise InvalidInput(
            f"the options of the variant `{variant.name}` do not suit its agent `{agent}`: {error.message}"
        ) from error


def check_prefix(agent: Agent, variant: Variant) -> None:
    """Raise InvalidInput for a prefix if the agent runs elsewhere: its requests begin with a prompt."""
    if agent.runs_elsewhere and (variant.prefix or variant.prefix_extra):
        raise InvalidInput(
            f"the variant `{variant.name}` must have no prefix, because its agent runs in a process that the worker "
            "does not contain, and requests of such a process cannot continue it; use a hint, or another agent"
        )


def check_permission(config: RolloutConfig, name: str, variant: Variant) -> None:
    """Raise PermissionDenied unless `rollout.private_extras` permits the extras that a variant names to its agent,
    which is `name` in `rollout.agents`, or empty."""
    agent = name or config.agent.name
    permitted = config.private_extras.get(agent, ())
    if missing := [extra for extra in variant.extras if extra not in permitted]:
        remedy = f"rollout: {{private_extras: {{{agent}: [{', '.join(missing)}]}}}}"
        raise PermissionDenied(
            f"the variant `{variant.name}` uses the private extra `{missing[0]}`, which the configuration does not "
            f"permit to its agent `{agent}`; if it may, add `{remedy}`"
        )


class VariantTexts(NamedTuple):
    """What a variant adds to the conversation."""

    hint: str = ""
    prefix: str = ""


def texts_of(variant: Variant, extras: PrivateExtras) -> VariantTexts:
    """Return the texts of a variant. `extras` has the private ones that it names. Raise InvalidInput for a task that
    lacks one; an extra that is null or empty adds nothing."""
    return VariantTexts(
        hint=extras.text(variant.hint_extra) if variant.hint_extra else variant.hint,
        prefix=extras.text(variant.prefix_extra) if variant.prefix_extra else variant.prefix,
    )


def with_hint(task: Task, hint: str) -> Task:
    """Return the task with a hint at the end of its last user message. Raise InvalidInput for a task without one."""
    if not hint:
        return task
    places = [place for place, message in enumerate(task.messages) if message.role == "user"]
    if not places:
        raise InvalidInput(
            f"the task {task.task_id} has no user message, so that the hint of its variant has no place; use a prefix, "
            "or tasks with a user message"
        )
    message = task.messages[places[-1]]
    hinted = Message(role=message.role, content=f"{message.content}\n\n{hint}")
    messages: Sequence[Message] = (*task.messages[: places[-1]], hinted, *task.messages[places[-1] + 1 :])
    return replace(task, messages=tuple(messages))
