"""Read the tasks of a configuration once, and keep what its checks need, because reading a task may take time.

Of a pool that reads its tasks from files, at most `STORED_TASKS_MAX` are read, which are spread evenly over it.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from rollmesh.services.data.task import PoolTask, Split, StoredPool, TaskPool
from rollmesh.services.reward.oracles import names_record

PROMPTS_CHECKED = 64
"""Prompts whose length is compared with the context: the longest of all tasks, by their characters."""
STORED_TASKS_MAX = 50_000
_READ_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class TaskSurvey:
    """What the checks need of all tasks."""

    tools_by_agent: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of the tools that any task lists, by the name of its agent. The empty name is the default agent."""
    scored_by: Mapping[tuple[Split, tuple[str, ...]], PoolTask] = field(default_factory=dict)
    """The first task of each split with these names of scorers. No names mean all scorers."""
    by_agent: Mapping[str, PoolTask] = field(default_factory=dict)
    """The first task by the name of its agent."""
    longest: tuple[PoolTask, ...] = ()
    """The tasks with the longest prompts, by their characters."""
    repeated: tuple[tuple[PoolTask, ...], ...] = ()
    """Tasks of task files that have the same prompt."""
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
    scored_by: dict[tuple[Split, tuple[str, ...]], PoolTask] = {}
    same: dict[bytes, list[PoolTask]] = {}
    first_tools: dict[Split, tuple[str, ...]] = {}

    def read() -> Iterator[PoolTask]:
        for split, pool in pools.items():
            for task in _tasks(pool):
                first_tools.setdefault(split, tuple(task.tools))
                tools.setdefault(task.agent, set()).update(task.tools)
                if task.agent not in by_agent:
                    by_agent[task.agent] = _whole(pool, task)
                scored_by.setdefault((split, tuple(task.scorers)), task)
                if names_record(task.oracle_ref):
                    same.setdefault(hashlib.sha256(msgspec.msgpack.encode(task.messages)).digest(), []).append(task)
                yield task

    longest = heapq.nlargest(PROMPTS_CHECKED, read(), key=lambda task: sum(len(one.content) for one in task.messages))
    repeated = tuple(tuple(tasks) for tasks in same.values() if len(tasks) > 1)
    return TaskSurvey(
        tools_by_agent={agent: frozenset(names) for agent, names in tools.items()},
        by_agent=by_agent,
        scored_by=scored_by,
        longest=tuple(longest),
        repeated=repeated,
        num_tasks={split: len(pool) for split, pool in pools.items()},
        first_tools=first_tools.get(Split.TRAIN, ()),
    )


def _whole(pool: TaskPool, task: PoolTask) -> PoolTask:
    """Return a task of the pool with its private extras."""
    position = pool.position(task.task_id) if isinstance(pool, StoredPool) else None
    return task if position is None else pool.task(position)


def _tasks(pool: TaskPool) -> Iterator[PoolTask]:
    if not isinstance(pool, StoredPool):
        yield from map(pool.task, range(len(pool)))
        return
    num = min(len(pool), STORED_TASKS_MAX)
    positions = [number * len(pool) // num for number in range(num)]
    for start in range(0, num, _READ_AT_ONCE):
        yield from pool.read(positions[start : start + _READ_AT_ONCE])
