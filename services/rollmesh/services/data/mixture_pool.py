"""A pool of the tasks of several sources, which reads a task from the pool of its source.

The sources take turns, in the order of the configuration, until one has no further task; the others continue:

    sources a (3 tasks), b (1), c (2)      positions 0-5: a0 b0 c0 a1 c1 a2

So the first n tasks of a split, which an evaluation takes, have every source in equal numbers, as far as it has tasks.
A task has the id `SOURCE/ID`, because two sources may have the same ids, and the label `source`. Neither the order nor
a look-up needs memory per task.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgpack
import numpy as np

from rollmesh.services.data.labels import LabelCodes, LabelledPool, one_value, read_labels
from rollmesh.services.data.task import PoolTask, StoredPool, TaskPool, read_tasks

SOURCE_LABEL = "source"
SOURCES_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """The tasks of one source in one split."""

    source: str
    pool: TaskPool
    agent: str = ""
    """Agent of the tasks that name none."""
    scorers: tuple[str, ...] = ()
    """Scorers of the tasks that name none."""

    def mixed(self, task: PoolTask) -> PoolTask:
        """Return a task of the pool as the mixture has it."""
        return replace(
            task,
            task_id=f"{self.source}/{task.task_id}",
            labels={**task.labels, SOURCE_LABEL: self.source},
            agent=task.agent or self.agent,
            scorers=task.scorers or self.scorers,
        )


class MixturePool(StoredPool, LabelledPool):
    """The tasks of all parts, see the module."""

    def __init__(self, parts: Sequence[MixturePart]) -> None:
        self._parts = {part.source: part for part in parts}
        self._starts, self._rounds = [0], [0]
        """First position and first round of each stage. In a round, each source that has a task left takes a turn; in
        a stage, these sources are the same."""
        self._turns: list[tuple[MixturePart, ...]] = []
        for size in sorted({len(part.pool) for part in parts} - {0}):
            turns = tuple(part for part in parts if len(part.pool) >= size)
            self._starts.append(self._starts[-1] + (size - self._rounds[-1]) * len(turns))
            self._rounds.append(size)
            self._turns.append(turns)
        described = [[part.source, part.agent, part.scorers, part.pool.digest] for part in parts]
        self._digest = hashlib.sha256(msgpack.packb(described)).hexdigest()

    @property
    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return self._starts[-1]

    def task(self, position: int) -> PoolTask:
        part, own = self._locate(position)
        return part.mixed(part.pool.task(own))

    def read(self, positions: Sequence[int]) -> list[PoolTask]:
        places: dict[str, list[tuple[int, int]]] = {}
        for place, (part, own) in enumerate(map(self._locate, positions)):
            places.setdefault(part.source, []).append((place, own))
        found: dict[int, PoolTask] = {}
        for source, of_part in places.items():
            part = self._parts[source]
            tasks = read_tasks(part.pool, [own for _, own in of_part])
            found |= {place: part.mixed(task) for (place, _), task in zip(of_part, tasks, strict=True)}
        return [found[place] for place in range(len(positions))]

    def position(self, task_id: str) -> int | None:
        source, _, own_id = task_id.partition("/")
        part = self._parts.get(source)
        own = part.pool.position(own_id) if part is not None else None
        if part is None or own is None:
            return None
        stage = bisect_right(self._rounds, own) - 1
        turns = self._turns[stage]
        return self._starts[stage] + (own - self._rounds[stage]) * len(turns) + turns.index(part)

    def label(self, position: int, name: str) -> str:
        part, own = self._locate(position)
        return part.source if name == SOURCE_LABEL else part.pool.label(own, name)

    def labels(self, name: str) -> LabelCodes:
        codes, known = np.zeros(len(self), dtype=np.uint32), dict[str, int]()
        for part in self._parts.values():
            num = len(part.pool)
            of_part = one_value(part.source, num) if name == SOURCE_LABEL else read_labels(part.pool, name)
            new = np.array([known.setdefault(value, len(known)) for value in of_part.values], dtype=np.uint32)
            for stage, turns in enumerate(self._turns):
                if part in turns:
                    own = slice(self._rounds[stage], self._rounds[stage + 1])
                    at = slice(self._starts[stage] + turns.index(part), self._starts[stage + 1], len(turns))
                    codes[at] = new[of_part.codes[own]]
        return LabelCodes(codes, tuple(known))

    def _locate(self, position: int) -> tuple[MixturePart, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"position must be in [0, {len(self)}), got {position}")
        stage = bisect_right(self._starts, position) - 1
        turns = self._turns[stage]
        rounds, turn = divmod(position - self._starts[stage], len(turns))
        return turns[turn], self._rounds[stage] + rounds
