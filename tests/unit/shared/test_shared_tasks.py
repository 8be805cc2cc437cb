"""Shared work runs once per key, and survives the callers that wait for it."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.shared.errors import Cancelled, NotFound
from rollmesh.shared.shared_tasks import SharedTasks


class Work:
    def __init__(self) -> None:
        self.num_begun = 0
        self.gate = asyncio.Event()

    async def __call__(self) -> int:
        self.num_begun += 1
        number = self.num_begun
        await self.gate.wait()
        return number


async def test_callers_of_one_key_share_one_task_which_survives_them() -> None:
    tasks: SharedTasks[str, int] = SharedTasks("the work on")
    work, other = Work(), Work()
    first, second = (asyncio.create_task(tasks.join("a", work)) for _ in range(2))
    beside = asyncio.create_task(tasks.join("b", other))
    await asyncio.sleep(0)
    first.cancel()
    other.gate.set()
    assert await beside == 1
    assert (work.num_begun, list(tasks)) == (1, ["a"])
    work.gate.set()
    assert await second == 1
    assert first.cancelled()
    assert not tasks
    assert await tasks.join("a", work) == 2


async def test_an_error_reaches_every_caller_and_the_next_one_tries_again() -> None:
    tasks: SharedTasks[str, int] = SharedTasks("the work on")
    work = Work()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise NotFound("nothing there")

    for answer in await asyncio.gather(*(tasks.join("a", fail) for _ in range(3)), return_exceptions=True):
        assert isinstance(answer, NotFound)
    work.gate.set()
    assert await tasks.join("a", work) == 1


async def test_cancelled_work_is_a_typed_error() -> None:
    tasks: SharedTasks[str, int] = SharedTasks("the work on")
    waiting = [asyncio.create_task(tasks.join(key, Work())) for key in ("a", "b", "c")]
    await asyncio.sleep(0)
    await tasks.cancel("a")
    await tasks.close()
    for task in waiting:
        with pytest.raises(Cancelled, match="the work on . was cancelled"):
            await task
    assert not tasks
