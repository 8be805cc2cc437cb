"""Draw tasks, and save and restore the state of the draws, for any number of runs over one source.

A run is followed after the first call that names it. Its selector chooses training tasks. Evaluation and export use the
tasks of a split in order, which is the same for every run and every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.follower import RunFollower
from rollmesh.services.data.selector import Selector, SourceShare
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.services.data.task import PoolTask, Split, StoredPool, TaskPool, read_tasks
from rollmesh.shared.bus.archive_bus import open_ledger
from rollmesh.shared.bus.bus import Bus, UnknownStream
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.plans import Plan
from rollmesh.shared.errors import OutOfRange, ResourceExhausted, UnknownRun, UnknownSplit, UnknownTask
from rollmesh.shared.shared_tasks import SharedTasks

READ_FIRST = 64
"""Tasks that are read from files before their size is known."""
READ_CHARS_MAX = 4 * 1024 * 1024
"""Characters of prompts after which no more tasks are read from files, because a response has no room for more."""
DrawnTasks = list[tuple[int, PoolTask]]
"""Draw index and task, in the order of draws."""
PlannedTasks = list[tuple[int, PoolTask, Plan]]
"""Draw index, task and plan, in the order of draws."""


class DataEngine:
    """Tasks of one source for the runs of one bus. Call `close` at the end."""

    def __init__(
        self,
        *,
        pools: Mapping[Split, TaskPool],
        new_selector: Callable[[TaskPool], Selector],
        bus: Bus,
        clock: Clock,
        success_reward: str = "",
        epochs_max: int = 0,
        catch_up_s_max: float = 5.0,
        runs_max: int = 16,
        snapshots: SnapshotFolder | None = None,
        snapshot_records: int = 0,
    ) -> None:
        """`DataConfig` describes the settings."""
        self._pools = dict(pools)
        self._new_selector = new_selector
        self._bus = bus
        self._clock = clock
        self._success_reward = success_reward
        self._epochs_max = epochs_max
        self._catch_up_s_max = catch_up_s_max
        self._runs_max = runs_max
        self._snapshots = snapshots
        self._snapshot_records = snapshot_records
        self._runs: dict[str, RunFollower] = {}
        self._opening: SharedTasks[str, RunFollower] = SharedTasks("the opening of run")
        self._closing = asyncio.Lock()
        """Held while followers are closed, so that none is closed twice."""

    async def next_tasks(
        self, *, run: str, policy: str, first_draw: int, num: int, ledger_position: int = 0
    ) -> PlannedTasks:
        """Return training tasks of draws [first_draw, first_draw + num), fewer if their prompts exceed
        `READ_CHARS_MAX`, with their plans. Raise UnknownRun, CatchingUp, OutOfRange, InvalidInput for a plan that no
        run could have."""
        pool = self._pools[Split.TRAIN]
        if not len(pool):
            raise OutOfRange(
                "this mesh has no training tasks, because `data.source` is `submitted`; create the run with "
                "`submitted_tasks: true`, and submit tasks (SubmitTasks)"
            )
        follower = await self._follower(run)
        drawn = await follower.draws(policy=policy, first_draw=first_draw, num=num, ledger_position=ledger_position)
        tasks = await _read(pool, [position for position, _ in drawn])
        plans = [plan for _, plan in drawn]
        return [(first_draw + n, task, plans[n]) for n, task in enumerate(tasks)]

    async def tasks_in_order(self, *, split: str, first_draw: int, num: int) -> DrawnTasks:
        """Return tasks [first_draw, first_draw + num) of a split, fewer at its end, or if their prompts exceed
        `READ_CHARS_MAX`. Raise UnknownSplit, OutOfRange beyond the end."""
        pool = self._pool(split)
        if first_draw >= len(pool):
            raise OutOfRange(
                f"`first_draw` must be < {len(pool)}, the number of tasks in split `{split}`, got {first_draw}",
                draw=first_draw,
            )
        draws = range(first_draw, min(first_draw + num, len(pool)))
        return list(zip(draws, await _read(pool, draws), strict=False))

    async def private_extras(self, *, split: str, task_id: str, names: Collection[str]) -> dict[str, object]:
        """Return the private extras of a task that are among `names`. Raise UnknownSplit, UnknownTask."""
        pool = self._pool(split)
        if (position := pool.position(task_id)) is None:
            raise UnknownTask(
                f"the split `{split}` has no task `{task_id}`; give every data node the source that drew it",
                task=task_id,
            )
        task = await asyncio.to_thread(pool.task, position) if isinstance(pool, StoredPool) else pool.task(position)
        return {name: value for name, value in task.private_extras.items() if name in names}

    def positions(self) -> dict[str, int]:
        """Return the last folded ledger record of each followed run."""
        return {run: follower.position for run, follower in self._runs.items()}

    def source_shares(self) -> dict[str, list[SourceShare]]:
        """Return the shares of the sources in each followed run, if its selector gives them shares."""
        return {run: follower.source_shares for run, follower in self._runs.items()}

    async def snapshot(self, run: str) -> tuple[bytes, int]:
        """Return the state of the run and the ledger sequence of its last folded record. Raise UnknownRun,
        CatchingUp."""
        return await (await self._follower(run)).snapshot()

    async def restore(self, run: str, state: bytes) -> int:
        """Replace the state of the run, and return its ledger sequence. Raise UnknownRun, CorruptSnapshot."""
        return await (await self._follower(run)).restore(state)

    async def forget(self, run: str) -> None:
        """Stop following a run, and delete its snapshots."""
        await self._opening.cancel(run)
        async with self._closing:
            if (follower := self._runs.pop(run, None)) is not None:
                await follower.close()
            if self._snapshots is not None:
                await asyncio.to_thread(self._snapshots.delete, run)

    async def close(self) -> None:
        """Stop following all runs."""
        await self._opening.close()
        for follower in self._runs.values():
            await follower.close()
        self._runs.clear()

    def _pool(self, split: str) -> TaskPool:
        known = [name for name, pool in self._pools.items() if len(pool)]
        if split not in known:
            raise UnknownSplit(f"the split `{split}` has no tasks; splits with tasks: {', '.join(known)}", split=split)
        return self._pools[Split(split)]

    async def _follower(self, run: str) -> RunFollower:
        return self._runs.get(run) or await self._opening.join(run, lambda: self._open(run))

    async def _open(self, run: str) -> RunFollower:
        await self._make_room()
        try:
            ledger = await open_ledger(self._bus, run)
        except UnknownStream:
            raise UnknownRun(f"run `{run}` has no ledger; call CreateRun first", run=run) from None
        pool = self._pools[Split.TRAIN]
        draws = RunDraws(
            pool=pool,
            new_selector=self._new_selector,
            success_reward=self._success_reward,
            num_draws_max=self._epochs_max * len(pool),
        )
        follower = RunFollower(
            run=run,
            ledger=ledger,
            draws=draws,
            clock=self._clock,
            catch_up_s_max=self._catch_up_s_max,
            snapshots=self._snapshots,
            snapshot_records=self._snapshot_records,
        )
        await follower.open()
        self._runs[run] = follower
        return follower

    async def _make_room(self) -> None:
        """Stop following runs that have ended. A call that names one of them follows it again."""
        async with self._closing:
            for name, follower in list(self._runs.items()):
                if follower.ended:
                    del self._runs[name]
                    await follower.close()
        if len(self._runs) + len(self._opening) > self._runs_max:
            raise ResourceExhausted(
                f"the limit of {self._runs_max} followed runs (`data.runs_max`) is reached; stop a run or raise the "
                "limit"
            )


async def _read(pool: TaskPool, positions: Sequence[int]) -> list[PoolTask]:
    """Return the tasks at positions. Of a stored pool, omit those for which a response has no room."""
    if not isinstance(pool, StoredPool):
        return read_tasks(pool, positions)
    tasks: list[PoolTask] = []
    size, num = 0, READ_FIRST
    while len(tasks) < len(positions) and size < READ_CHARS_MAX:
        tasks += await asyncio.to_thread(pool.read, positions[len(tasks) : len(tasks) + num])
        size = sum(len(message.content) for task in tasks for message in task.messages)
        num = 1 + (READ_CHARS_MAX - size) * len(tasks) // max(1, size)
    return tasks
