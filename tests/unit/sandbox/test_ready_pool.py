"""Assignment of a pool's sessions: first come, first served, and no open is overtaken, deprived or forgotten."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.engines.forks import LiveSession
from rollmesh.services.sandbox.engines.ready_pool import ReadyPool


class Session:
    """Replaces a live session; the pool only passes it on."""


class Opens:
    """Opens by name, and the order of their results."""

    def __init__(self, num_making: int) -> None:
        self.pool = ReadyPool("python", Limits(), 8, 60.0)
        self.pool.num_making = num_making
        self.back: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._wait(name))
        await settle()

    async def _wait(self, name: str) -> None:
        await self.pool.next_made()
        self.back.append(name)

    async def make(self, num: int = 1) -> None:
        for _ in range(num):
            self.pool.made(cast(LiveSession, Session()))
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_longest_waiter_gets_the_first_that_is_ready() -> None:
    opens = Opens(num_making=2)
    await opens.come("a", "b")
    assert opens.pool.num_free == 0
    await opens.make()
    assert opens.back == ["a"]
    await opens.make()
    assert opens.back == ["a", "b"]
    assert len(opens.pool.ready) == opens.pool.num_free == 2, "the callers take them"


async def test_a_later_open_does_not_take_a_reserved_session() -> None:
    opens = Opens(num_making=1)
    await opens.come("a")
    opens.pool.made(cast(LiveSession, Session()))
    assert not opens.pool.has_unreserved
    assert opens.pool.num_free == 0
    await settle()
    assert opens.back == ["a"]
    assert opens.pool.has_unreserved


async def test_one_that_fails_disappoints_who_came_last() -> None:
    opens = Opens(num_making=2)
    await opens.come("a", "b")
    opens.pool.not_made()
    await settle()
    assert opens.back == ["b"]
    await opens.make()
    assert opens.back == ["b", "a"]


async def test_a_failed_creation_rejects_no_open_while_others_remain() -> None:
    opens = Opens(num_making=2)
    await opens.come("a")
    opens.pool.not_made()
    await settle()
    assert opens.back == []
    await opens.make()
    assert opens.back == ["a"]


@pytest.mark.parametrize("notified", [False, True], ids=["before the notification", "after the notification"])
async def test_an_open_that_is_cancelled_leaves_its_session_to_others(notified: bool) -> None:
    opens = Opens(num_making=2)
    await opens.come("a", "b")
    if notified:
        opens.pool.made(cast(LiveSession, Session()))
    opens.tasks["a"].cancel()
    if not notified:
        opens.pool.made(cast(LiveSession, Session()))
    await settle()
    assert opens.back == ([] if notified else ["b"])
    assert opens.pool.has_unreserved, "b or a later open takes it"
    await opens.make()
    assert opens.back == ["b"]
    assert opens.pool.num_free == 2


async def test_all_waiters_are_notified_when_no_session_is_being_created() -> None:
    opens = Opens(num_making=2)
    await opens.come("a", "b")
    opens.tasks["b"].cancel()
    opens.pool.not_made()
    opens.pool.not_made()
    await settle()
    assert opens.back == ["a"]
    assert opens.pool.num_free == 0
