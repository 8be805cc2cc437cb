"""A pool of tasks in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgpack

from rollmesh.services.data.task import PoolTask
from rollmesh.shared.domain.extras import encode_extras


class MemoryPool:
    """An immutable sequence of tasks with unique ids."""

    def __init__(self, tasks: Iterable[PoolTask]) -> None:
        self._tasks = tuple(tasks)
        self._positions = {task.task_id: position for position, task in enumerate(self._tasks)}
        if len(self._positions) != len(self._tasks):
            raise ValueError("task ids of a pool must be unique")
        self._digest = _digest(self._tasks)

    @property
    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, position: int) -> PoolTask:
        if position < 0:
            raise IndexError(f"position must be >= 0, got {position}")
        return self._tasks[position]

    def position(self, task_id: str) -> int | None:
        return self._positions.get(task_id)

    def label(self, position: int, name: str) -> str:
        return self.task(position).labels.get(name, "")


def _digest(tasks: Iterable[PoolTask]) -> str:
    """Return the SHA-256 of ids, messages, labels, oracle references, agents, scorers and extras, each part packed with
    its length. Tasks without agent, scorers and extras have the digest of releases that had none, whose snapshots are
    read."""
    digest = hashlib.sha256()
    for task in tasks:
        messages = [(message.role, message.content) for message in task.messages]
        parts = [task.task_id, messages, sorted(task.labels.items()), task.oracle_ref]
        named = [task.agent, task.scorers] if task.agent or task.scorers else []
        extras = [sorted(encode_extras(one).items()) for one in (task.extras, task.private_extras)]
        digest.update(msgpack.packb([*parts, *named, *(extras if any(extras) else [])]))
    return digest.hexdigest()
