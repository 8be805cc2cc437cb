"""Checks of the variants of a configuration: their agents with their options, and what they take from tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollmesh.app.checks.task_survey import TaskSurvey
from rollmesh.mesh.config import MeshConfig
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.rollout.agent import known_agents, permitted_extras
from rollmesh.services.rollout.private_extras import missing_extra_error
from rollmesh.services.rollout.variants import agent_with, check_permission, check_prefix
from rollmesh.shared.domain.plans import Variant
from rollmesh.shared.errors import ConfigError, InvalidInput, MeshError, PermissionDenied


def variant_mistakes(config: MeshConfig, base_dir: Path, tasks: TaskSurvey) -> Iterator[MeshError]:
    """Yield the mistakes in `run.variants`. Mistakes of the agents themselves have been found before."""
    rollout = config.rollout
    for index, variant in enumerate(config.run.variants):
        key = f"run.variants[{index}]"
        if variant.agent and variant.agent not in rollout.agents:
            yield ConfigError(
                f"`{key}.agent`: the agent `{variant.agent}` does not exist; "
                f"{known_agents(rollout.agents, 'the variant')}",
                key=f"{key}.agent",
            )
            continue
        of_tasks = {task.agent for task in tasks.by_agent.values() if task.split == Split.TRAIN} or {""}
        for name in [variant.agent] if variant.agent else sorted(of_tasks & {"", *rollout.agents}):
            try:
                with_prefix = variant.prefix or variant.prefix_extra
                agent = agent_with(rollout, name, variant, base_dir) if variant.options or with_prefix else None
                check_permission(rollout, name, variant)
                if agent is not None:
                    check_prefix(agent, variant)
                    permitted_extras(name or rollout.agent.name, agent, rollout)
            except (InvalidInput, PermissionDenied) as error:
                yield ConfigError(f"`{key}`: {error.message}", key=key)
        yield from _of_tasks(key, variant, tasks)


def _of_tasks(key: str, variant: Variant, tasks: TaskSurvey) -> Iterator[MeshError]:
    """Yield what the tasks lack of what a variant needs."""
    for task in (one for one in tasks.with_private_extras if one.split == Split.TRAIN):
        if missing := [name for name in variant.extras if name not in task.private_extras]:
            what = missing_extra_error(task.task_id, task.labels, missing[0])
            yield ConfigError(f"`{key}`: {what}, or use another variant", key=key)
            return
    if variant.hint or variant.hint_extra:
        for task in (one for one in tasks.by_agent.values() if one.split == Split.TRAIN):
            if not _has_user_message(task):
                what = f"the task {task.task_id} has no user message, so that the hint has no place; use `prefix`"
                yield ConfigError(f"`{key}`: {what}", key=key)
                return


def _has_user_message(task: PoolTask) -> bool:
    return any(message.role == "user" for message in task.messages)
