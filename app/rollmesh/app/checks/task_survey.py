"""Read the tasks of a configuration once, and keep what its checks need, because reading a task may take time.

Of a pool that reads its tasks from files, at most `STORED_TASKS_MAX` are read: the first ones, among which each source
of a mixture has a task, and a sample of the others. Tasks at equal distances could all be those of one source.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rollmesh.services.data.mixture_pool import SOURCE_LABEL, SOURCES_MAX, MixturePool
from rollmesh.services.data.task import PoolTask, Split, StoredPool, TaskPool
from rollmesh.services.reward.oracles import names_record

PROMPTS_CHECKED = 64
"""Prompts whose length is compared with the context: the longest of all tasks, by their characters."""
STORED_TASKS_MAX = 50_000
REPEATED_MAX = 1_000
"""Tasks with equal prompts whose answers are compared. Their answer keys are held in memory."""
_READ_AT_ONCE = 1024


class RecordTask(NamedTuple):
    """A task whose oracle is a record of a file. Its prompt is not kept."""

    task_id: str
    oracle_ref: str


@dataclass(frozen=True, slots=True)
class TaskSurvey:
    """What the checks need of all tasks."""

    tools_by_agent: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of the tools that any task lists, by the name of its agent. The empty name is the default agent."""
    scored_by: Mapping[tuple[Split, tuple[str, ...]], PoolTask] = field(default_factory=dict)
    """The first task of each split with these names of scorers. No names mean all scorers."""
    by_agent: Mapping[str, PoolTask] = field(default_factory=dict)
    """The first task by the name of its agent."""
    with_private_extras: tuple[PoolTask, ...] = ()
    """The first task by its agent, its source in a mixture, and the names of its private extras if the pool is in
    memory; each has its private extras."""
    longest: tuple[PoolTask, ...] = ()
    """The tasks with the longest prompts, by their characters."""
    repeated: tuple[tuple[RecordTask, ...], ...] = ()
    """Tasks of task files that have the same prompt, at most `REPEATED_MAX`."""
    num_tasks: Mapping[Split, int] = field(default_factory=dict)
    """Number of tasks of each split; none if the source is unusable."""
    first_tools: tuple[str, ...] = ()
    """Tools of the first training task."""

    @property
    def tools(self) -> frozenset[str]:
        """Names of the tools that any task lists."""
        return frozenset().union(*self.tools_by_agent.values())


def survey_tasks(pools: Mapping[Split, TaskPool]) -> TaskSurvey:
    """Return what the checks need of the tasks. Each position is read once."""
    tools: dict[str, set[str]] = {}
    by_agent: dict[str, PoolTask] = {}
    kinds: dict[tuple[str, str, frozenset[str]], PoolTask] = {}
    scored_by: dict[tuple[Split, tuple[str, ...]], PoolTask] = {}
    same: dict[bytes, list[RecordTask]] = {}
    first_tools: dict[Split, tuple[str, ...]] = {}

    def read() -> Iterator[PoolTask]:
        for split, pool in pools.items():
            for task in _tasks(pool):
                first_tools.setdefault(split, tuple(task.tools))
                tools.setdefault(task.agent, set()).update(task.tools)
                by_agent.setdefault(task.agent, task)
                source = task.labels[SOURCE_LABEL] if isinstance(pool, MixturePool) else ""
                kind = (task.agent, source, frozenset(task.private_extras))
                if kind not in kinds:
                    kinds[kind] = _with_private_extras(pool, task)
                scored_by.setdefault((split, tuple(task.scorers)), task)
                if names_record(task.oracle_ref):
                    prompt = hashlib.sha256(msgspec.msgpack.encode(task.messages)).digest()
                    same.setdefault(prompt, []).append(RecordTask(task.task_id, task.oracle_ref))
                yield task

    longest = heapq.nlargest(PROMPTS_CHECKED, read(), key=lambda task: sum(len(one.content) for one in task.messages))
    repeated: list[tuple[RecordTask, ...]] = []
    left = REPEATED_MAX
    for tasks in same.values():
        if len(tasks) > 1 and left > 1:
            repeated.append(tuple(tasks[:left]))
            left -= len(repeated[-1])
    return TaskSurvey(
        tools_by_agent={agent: frozenset(names) for agent, names in tools.items()},
        by_agent=by_agent,
        with_private_extras=tuple(kinds.values()),
        scored_by=scored_by,
        longest=tuple(longest),
        repeated=tuple(repeated),
        num_tasks={split: len(pool) for split, pool in pools.items()},
        first_tools=first_tools.get(Split.TRAIN, ()),
    )


def _with_private_extras(pool: TaskPool, task: PoolTask) -> PoolTask:
    """Return a task of the pool with its private extras."""
    position = pool.position(task.task_id) if isinstance(pool, StoredPool) else None
    return task if position is None else pool.task(position)


def _tasks(pool: TaskPool) -> Iterator[PoolTask]:
    if not isinstance(pool, StoredPool):
        yield from map(pool.task, range(len(pool)))
        return
    num = min(len(pool), STORED_TASKS_MAX)
    first = min(num, SOURCES_MAX)
    positions = [*range(first), *sorted(random.Random(0).sample(range(first, len(pool)), num - first))]
    for start in range(0, num, _READ_AT_ONCE):
        yield from pool.read(positions[start : start + _READ_AT_ONCE])
