"""Sessions kept ready: like fresh ones for whoever gets them, never in the way of live ones, and gone with their zygote and engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.engines.jail_session import JailSession, Reply
from rollmesh.services.sandbox.pools_config import PoolsConfig
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config import config_from_dict
from rollmesh.shared.errors import Overloaded
from rollmesh.shared.ids import RandomIds

from .process_tree import Process, descendants

WAIT_S = 30.0
IDLE_S = 50.0
LOOK = """
import os, resource, signal, sys, threading
limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith('RLIMIT')}
{
    'limits': limits, 'pid': os.getpid(), 'files': sorted(os.listdir('.')), 'cwd': os.getcwd(), 'room': os.statvfs('.').f_bavail,
    'names': sorted(globals()), 'threads': threading.active_count(), 'fds': sorted(os.listdir('/dev')), 'call': sys._getframe().f_code.co_filename,
    'alarm': signal.getitimer(signal.ITIMER_PROF)[1], 'environment': dict(os.environ), 'groups': os.getgroups(), 'umask': os.umask(0o22),
}
"""


class World:
    """An engine under a manual clock; ready sessions follow real opens."""

    def __init__(self, engine: JailEngine, config: SandboxConfig, clock: ManualClock) -> None:
        self.engine = engine
        self.sessions = Sessions(engine, config, clock)
        self.clock = clock

    async def open(self, session_id: str, profile: str = "python") -> None:
        await self.engine.open(session_id, profile, self.engine.limits(profile))

    async def ready(self, num: int, profile: str = "python") -> None:
        await until(lambda: self.num_ready(profile) == num)

    def num_ready(self, profile: str = "python") -> int:
        self.require_balanced()
        return self.engine.pool_counts().ready.get(profile, 0)

    def require_balanced(self) -> None:
        counts = self.engine.pool_counts()
        assert counts.made == counts.taken + counts.dropped + sum(counts.ready.values())

    async def look(self, session_id: str) -> str:
        result = await self.engine.run(session_id, Program(code=LOOK), 5.0)
        assert result.result, result.error_message
        return result.result

    async def tend(self, seconds: float = 1.5) -> None:
        """Let time pass; the pools' keeper sleeps again when this returns."""
        self.clock.advance(seconds)
        await until(lambda: self.clock.num_sleepers() == 1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - processes have no event to wait on
            await asyncio.sleep(0.005)


@asynccontextmanager
async def world_of(tmp_path: Path, *, most: int = 4, **changes: object) -> AsyncIterator[World]:
    pools = PoolsConfig(ready_max=most, halflife_s=10.0, zygote_idle_s=IDLE_S)
    config = SandboxConfig(pools=pools, **changes)  # type: ignore[arg-type]
    clock = ManualClock()
    engine = JailEngine(config, state_dir=tmp_path, ids=RandomIds(), clock=clock)
    await engine.start()
    try:
        await until(lambda: clock.num_sleepers() == 1)
        yield World(engine, config, clock)
    finally:
        await engine.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_of(tmp_path) as made:
        yield made


def records(folder: Path) -> list[Path]:
    """Of what should still be there, by the state directories in it."""
    return [*folder.glob("*/launcher-*"), *folder.glob("*/groups-*"), *folder.glob("*/folders-*")]


def processes() -> set[Process]:
    return set(descendants(os.getpid()))


async def test_a_session_that_was_ready_is_like_a_fresh_one(world: World) -> None:
    await world.open("fresh")
    await world.ready(1)
    before = processes()
    await world.open("pooled")
    assert world.engine.pool_counts().taken == 1
    assert await world.look("pooled") == await world.look("fresh")
    fresh, pooled = (world.engine._live[name] for name in ("fresh", "pooled"))
    assert fresh.limits == pooled.limits
    assert fresh.place.uid != pooled.place.uid or os.geteuid() != 0
    if fresh.place.group is not None and pooled.place.group is not None:
        assert _bounds(pooled.place.group.directories) == _bounds(fresh.place.group.directories)
    await world.engine.end("pooled")
    await until(lambda: len(processes() & before) == len(before) - 1)
    assert "pooled" not in world.engine._live


def _bounds(directories: object) -> list[str]:
    """The limits written to a session's cgroups."""
    assert isinstance(directories, dict)
    names = ("memory.max", "memory.limit_in_bytes", "pids.max", "cpu.max", "cpu.cfs_quota_us")
    found = [Path(folder) / name for folder in directories.values() for name in names]
    return sorted(f"{path.name} {path.read_text()}" for path in found if path.exists())


async def test_a_session_does_without_what_only_others_need(world: World) -> None:
    """What `threading` and `logging` do after a fork would be a tenth of its start."""
    await world.open("s")
    result = await world.engine.run("s", Program(code="import sys; {'threading', 'logging'} & set(sys.modules)"), 5.0)
    assert result.result == "set()"


async def test_what_one_session_did_is_not_in_the_next_ready_one(world: World) -> None:
    await world.open("first")
    await world.engine.run("first", Program(code="secret = 1; open('left', 'w').write('x')"), 5.0)
    await world.ready(1)
    await world.engine.run("first", Program(code="import os; os.environ['secret'] = '1'"), 5.0)
    await world.engine.end("first")
    await world.open("second")
    assert "secret" not in await world.look("second")
    assert "left" not in await world.look("second")


async def test_limits_of_ones_own_get_a_session_of_ones_own(world: World) -> None:
    await world.open("first")
    await world.ready(1)
    narrow = replace(world.engine.limits("python"), processes_max=3)
    await world.engine.open("narrow", "python", narrow)
    assert "'RLIMIT_NPROC': (3, 3)" in await world.look("narrow")
    counts = world.engine.pool_counts()
    assert (counts.taken, counts.missed, world.num_ready()) == (0, 1, 1)


async def test_a_snapshot_is_restored_into_a_ready_session(world: World) -> None:
    pieces: list[bytes] = []

    async def save(piece: bytes) -> None:
        pieces.append(piece)

    async def saved() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    await world.open("first")
    await world.engine.run("first", Program(code="x = 6"), 5.0)
    await world.engine.snapshot("first", 1 << 20, save)
    await world.ready(1)
    await world.engine.open("second", "python", world.engine.limits("python"), saved())
    assert world.engine.pool_counts().taken == 1
    assert (await world.engine.run("second", Program(code="x * 7"), 5.0)).result == "42"


async def test_a_burst_is_remembered_and_forgotten(world: World) -> None:
    await asyncio.gather(*(world.open(f"a{number}") for number in range(3)))
    await world.ready(3)
    await asyncio.gather(*(world.open(f"b{number}") for number in range(3)))
    counts = world.engine.pool_counts()
    assert (counts.taken, counts.missed) == (3, 3)
    await world.ready(4)  # six came before one could be made by this clock; four are the most
    await world.tend(100.0)
    await world.ready(0)
    before = processes()
    await world.open("late")
    await until(lambda: world.num_ready() == 1)
    assert len(processes() - before) == 2, "its own, and one that is ready"


async def test_sessions_kept_ready_count_for_no_tenant_and_in_no_books(world: World) -> None:
    await world.sessions.open("s", profile="python", limits={}, ttl_s=0, owner="test", tenant="t")
    await world.ready(1)
    counts = world.sessions.counts()
    assert (counts.created, counts.live, sum(counts.ended.values())) == (1, 1, 0)
    assert world.sessions.owners() == {"s": "test"}


async def test_a_ready_session_that_was_killed_is_never_handed_out(world: World) -> None:
    await world.open("first")
    before = processes()
    await world.ready(1)
    (victim,) = processes() - before
    os.kill(victim.pid, signal.SIGKILL)
    await until(lambda: not victim.alive)
    await world.open("second")
    assert (await world.engine.run("second", Program(code="6*7"), 5.0)).result == "42"
    counts = world.engine.pool_counts()
    assert (counts.taken, counts.missed) == (0, 2)
    world.require_balanced()


async def test_a_dead_zygote_takes_its_pool_along_and_nobody_notices(world: World) -> None:
    await world.open("first")
    await world.ready(1)
    zygote = world.engine._zygotes.running("python")
    assert zygote is not None
    os.kill(zygote.pid, signal.SIGKILL)
    await until(lambda: world.num_ready() == 0)
    await world.open("second")
    assert (await world.engine.run("second", Program(code="6*7"), 5.0)).result == "42"
    await world.ready(2)


async def test_an_unused_zygote_ends_with_its_pool_and_starts_anew(world: World) -> None:
    await world.open("s")
    await world.open("other", "calc")
    await world.ready(1, "calc")
    await world.engine.end("s")
    await until(lambda: not world.engine._pools._making)
    await world.tend(IDLE_S)
    assert world.engine._zygotes.running("python") is None
    assert world.engine._zygotes.running("calc") is not None, "it has a session"
    await world.open("again")
    assert (await world.engine.run("again", Program(code="6*7"), 5.0)).result == "42"
    assert (await world.engine.call("other", "call", ["2*3"], 1.0)).result == "6"


async def test_a_zygote_that_is_to_be_warm_stays(tmp_path: Path) -> None:
    async with world_of(tmp_path, warm=("calc",)) as world:
        await world.tend(10 * IDLE_S)
        assert world.engine._zygotes.running("calc") is not None


async def test_live_sessions_get_every_place(tmp_path: Path) -> None:
    async with world_of(tmp_path, sessions_max=6, starts_inflight_max=1) as world:
        await asyncio.gather(*(world.open(f"a{number}") for number in range(3)))
        await until(lambda: world.num_ready() == 2)  # of six places, one stays free for whoever comes
        await asyncio.gather(*(world.open(f"b{number}", "calc") for number in range(3)))
        for name, profile in (("a", "run"), ("b", "call")):
            for number in range(3):
                session_id = f"{name}{number}"
                if profile == "run":
                    assert (await world.engine.run(session_id, Program(code="6*7"), 5.0)).result == "42"
                else:
                    assert (await world.engine.call(session_id, "call", ["6*7"], 1.0)).result == "42"
        assert world.num_ready() == 0
        assert world.engine.pool_counts().dropped >= 2
        with pytest.raises(Overloaded):
            await world.open("more")


async def test_a_pool_being_filled_gives_way(tmp_path: Path) -> None:
    async with world_of(tmp_path, sessions_max=3, starts_inflight_max=1) as world:
        await world.open("a")
        await asyncio.sleep(0)
        assert world.engine._pools._making
        await asyncio.gather(world.open("b", "calc"), world.open("c", "calc"))
        world.require_balanced()


async def test_sessions_with_egress_are_not_kept_ready(tmp_path: Path) -> None:
    profiles = config_from_dict(
        SandboxConfig, {"profiles": {"python": {}, "out": {"egress": "e"}}, "egress": {"e": {}}}
    )
    async with world_of(tmp_path, profiles=profiles.profiles, egress={"e": EgressConfig()}) as world:
        await world.open("a", "out")
        await world.open("b", "python")
        await world.ready(1, "python")
        assert "out" not in world.engine.pool_counts().ready


async def test_none_are_kept_where_the_configuration_says_so(tmp_path: Path) -> None:
    async with world_of(tmp_path, most=0) as world:
        await world.open("a")
        before = processes()
        await world.open("b")
        await world.tend()
        assert len(processes() - before) == 1
        assert world.engine.pool_counts().made == 0


class Slow:
    """Sessions that are made, but for the first few, are ready only when `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, first: int = 1) -> None:
        self.making = asyncio.Event()
        self.go = asyncio.Event()
        self._first = first
        self._receive = JailSession.receive
        monkeypatch.setattr(JailSession, "receive", lambda session, wall_s: self._answer(session, wall_s))

    async def _answer(self, session: JailSession, wall_s: float) -> Reply:
        self._first -= 1
        if self._first < 0:
            self.making.set()
            await self.go.wait()
        return await self._receive(session, wall_s)


@pytest.fixture
async def slow(world: World, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """One session is open, and the next one is being made."""
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
    await until(lambda: world.engine.pool_counts().missed == 2)  # the first open of all, and the second of these
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


async def test_an_open_whose_session_fails_in_the_making_gets_another(world: World, slow: Slow) -> None:
    opening = asyncio.create_task(world.open("b"))
    await asyncio.sleep(0)
    (made,) = (live for live in world.engine._pools._held)
    made.begin_end()
    await made.ended
    slow.go.set()
    await opening
    counts = world.engine.pool_counts()
    assert (counts.taken, counts.missed) == (0, 2)
    await world.look("b")


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's kernel may not carry the driver")
async def test_other_drivers_have_ready_sessions_too(tmp_path: Path) -> None:
    before = processes()
    async with world_of(tmp_path / "state", engine="none") as world:
        await world.open("a")
        await world.ready(1)
        await world.open("b")
        await world.engine.run("a", Program(code="open('left', 'w').write('x')"), 5.0)
        assert (await world.engine.run("b", Program(code="import os; os.listdir('.')"), 5.0)).result == "[]"
        assert world.engine.pool_counts().taken == 1
    assert world.num_ready() == 0
    await until(lambda: processes() <= before)
    assert records(tmp_path) == []


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
