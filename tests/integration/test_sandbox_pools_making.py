"""Ready sessions being created: their number, the opens that wait for them, and their end when the engine closes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.services.sandbox.engines.jail_session import JailSession, SessionReply
from rollmesh.shared.errors import SandboxFailed

from .pools_world import World, processes, records, until, world_of


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_of(tmp_path) as made:
        yield made


class Slow:
    """Make new sessions, except the first few, ready only when `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, first: int = 1) -> None:
        self.making = asyncio.Event()
        self.go = asyncio.Event()
        self._first = first
        self._receive = JailSession.receive
        monkeypatch.setattr(JailSession, "receive", lambda session, wall_s: self._answer(session, wall_s))

    async def _answer(self, session: JailSession, wall_s: float) -> SessionReply:
        self._first -= 1
        if self._first < 0:
            self.making.set()
            await self.go.wait()
        return await self._receive(session, wall_s)


@pytest.fixture
async def slow(world: World, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Yield a world in which one session is open and the next one is being created."""
    made = Slow(monkeypatch)
    await world.open("a")
    await made.making.wait()
    return made


async def test_an_open_gets_the_session_that_is_being_made(world: World, slow: Slow) -> None:
    opening = asyncio.create_task(world.open("b"))
    await asyncio.sleep(0)
    assert not opening.done()
    slow.go.set()
    await opening
    counts = world.engine.pool_counts()
    assert (counts.taken, counts.missed) == (1, 1)
    await world.look("b")
    world.require_balanced()


async def test_only_one_open_waits_for_it(world: World, slow: Slow) -> None:
    opening = [asyncio.create_task(world.open(name)) for name in "bc"]
    await until(lambda: world.engine.pool_counts().missed == 2)  # the first open, and the second of these
    slow.go.set()
    await asyncio.gather(*opening)
    assert world.engine.pool_counts().taken == 1
    await world.look("b")
    await world.look("c")


async def test_a_pool_is_filled_two_at_a_time_and_both_may_be_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, first=3)
    await asyncio.gather(*(world.open(f"a{number}") for number in range(3)))
    await until(lambda: len(world.engine._pools._making) == 2)
    opening = [asyncio.create_task(world.open(name)) for name in "bc"]
    await asyncio.sleep(0)
    assert len(world.engine._pools._making) == 2, "three were wanted before, and now more"
    slow.go.set()
    await asyncio.gather(*opening)
    counts = world.engine.pool_counts()
    assert (counts.taken, counts.missed) == (2, 3)
    world.require_balanced()


async def test_an_open_that_is_cancelled_leaves_it_to_the_next(world: World, slow: Slow) -> None:
    opening = asyncio.create_task(world.open("b"))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    slow.go.set()
    await world.open("b")
    assert world.engine.pool_counts().taken == 1
    await world.look("b")


async def test_an_open_whose_session_fails_during_creation_gets_another(world: World, slow: Slow) -> None:
    opening = asyncio.create_task(world.open("b"))
    await asyncio.sleep(0)
    (made,) = (live for live in world.engine._pools._held)
    made.kill()
    await made.ended
    slow.go.set()
    await opening
    counts = world.engine.pool_counts()
    assert (counts.taken, counts.missed) == (0, 2)
    await world.look("b")


async def test_a_turn_to_start_is_left_to_who_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world_of(tmp_path, starts_inflight_max=2) as world:
        slow = Slow(monkeypatch, first=3)
        await asyncio.gather(*(world.open(f"a{number}") for number in range(3)))
        await slow.making.wait()
        assert len(world.engine._pools._making) == 1
        assert world.engine._starts.idle
        slow.go.set()


async def test_a_fork_without_descriptors_releases_its_slot(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.open("a")
    await world.ready(1)
    used = world.engine._forks.slots.num_used

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", refuse)
        await world.open("b")  # the ready one; the next cannot be created
        await until(lambda: not world.engine._pools._planned)
        with pytest.raises(SandboxFailed, match="Too many open files"):
            await world.open("c")
        assert world.engine._forks.slots.num_used == used
    await world.open("c")


async def test_close_leaves_nothing_ready_or_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = processes()
    async with world_of(tmp_path / "filled") as world:
        await asyncio.gather(*(world.open(f"a{number}") for number in range(3)))
        await world.ready(3)
    async with world_of(tmp_path / "filling") as world:
        slow = Slow(monkeypatch, first=3)
        await asyncio.gather(*(world.open(f"a{number}") for number in range(3)))
        await slow.making.wait()
    assert world.num_ready() == 0
    await until(lambda: processes() <= before)
    assert records(tmp_path) == []
