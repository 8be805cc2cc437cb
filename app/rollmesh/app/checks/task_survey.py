"""Read every task of a configuration once, and keep what its checks need, because reading a task may take time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollmesh.services.data.task import PoolTask, Split, TaskPool
from rollmesh.shared.domain.trajectory import Message

PROMPTS_CHECKED = 64
"""Prompts whose length is compared with the context: the longest of all tasks, by their characters."""


@dataclass(frozen=True, slots=True)
class TaskSurvey:
    """What the checks need of all tasks."""

    tools: frozenset[str] = frozenset()
    """Names of the tools that any task lists."""
    longest: tuple[PoolTask, ...] = ()
    """The tasks with the longest prompts, by their characters."""
    repeated: tuple[tuple[PoolTask, ...], ...] = ()
    """Tasks of a JSONL file that have the same prompt."""


def survey_tasks(pools: Mapping[Split, TaskPool]) -> TaskSurvey:
    """Return what the checks need of the tasks. Each position is read once."""
    tools: set[str] = set()
    same: dict[tuple[Message, ...], list[PoolTask]] = {}

    def read() -> Iterator[PoolTask]:
        for pool in pools.values():
            for position in range(len(pool)):
                task = pool.task(position)
                tools.update(task.tools)
                if task.oracle_ref.startswith("jsonl:"):
                    same.setdefault(task.messages, []).append(task)
                yield task

    longest = heapq.nlargest(PROMPTS_CHECKED, read(), key=lambda task: sum(len(one.content) for one in task.messages))
    repeated = tuple(tuple(tasks) for tasks in same.values() if len(tasks) > 1)
    return TaskSurvey(frozenset(tools), tuple(longest), repeated)
