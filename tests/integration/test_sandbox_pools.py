"""Ready sessions: equal to fresh ones, without delaying live ones, and ended with their zygote and engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import Overloaded

from .pools_world import IDLE_S, World, processes, records, until, world_of


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_of(tmp_path) as made:
        yield made


async def test_a_session_that_was_ready_is_like_a_fresh_one(world: World) -> None:
    await world.open("fresh")
    await world.ready(1)
    before = processes()
    await world.open("pooled")
    assert world.engine.pool_counts().taken == 1
    assert await world.look("pooled") == await world.look("fresh")
    fresh, pooled = (world.engine._live[name] for name in ("fresh", "pooled"))
    assert fresh.limits == pooled.limits
    assert fresh.slot.uid != pooled.slot.uid or os.geteuid() != 0
    if fresh.slot.group is not None and pooled.slot.group is not None:
        assert _bounds(pooled.slot.group.directories) == _bounds(fresh.slot.group.directories)
    await world.engine.end("pooled")
    await until(lambda: len(processes() & before) == len(before) - 1)
    assert "pooled" not in world.engine._live


def _bounds(directories: object) -> list[str]:
    """Return the limits written to a session's cgroups."""
    assert isinstance(directories, dict)
    names = ("memory.max", "memory.limit_in_bytes", "pids.max", "cpu.max", "cpu.cfs_quota_us")
    found = [Path(folder) / name for folder in directories.values() for name in names]
    return sorted(f"{path.name} {path.read_text()}" for path in found if path.exists())


async def test_a_session_does_without_what_only_others_need(world: World) -> None:
    """The work of `threading` and `logging` after a fork would be a tenth of a session's start."""
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
    await world.ready(4)  # by this clock six were opened before one was created; four are the maximum
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


async def test_the_pool_of_an_exited_zygote_is_replaced_without_an_error(world: World) -> None:
    await world.open("first")
    await world.ready(1)
    zygote = world.engine._zygotes.running("python")
    assert zygote is not None
    os.kill(zygote.pid, signal.SIGKILL)
    await until(lambda: world.num_ready() == 0)
    await world.open("second")
    assert (await world.engine.run("second", Program(code="6*7"), 5.0)).result == "42"
    await world.ready(2)


async def test_an_unused_zygote_ends_with_its_pool_and_restarts(world: World) -> None:
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


async def test_live_sessions_get_every_slot(tmp_path: Path) -> None:
    async with world_of(tmp_path, sessions_max=6, starts_inflight_max=1) as world:
        await asyncio.gather(*(world.open(f"a{number}") for number in range(3)))
        await until(lambda: world.num_ready() == 2)  # of six slots one stays free for the next open
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


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's kernel may not carry the driver")
async def test_other_drivers_have_ready_sessions_too(tmp_path: Path) -> None:
    before = processes()
    async with world_of(tmp_path / "state", engine=Extension("none")) as world:
        await world.open("a")
        await world.ready(1)
        await world.open("b")
        await world.engine.run("a", Program(code="open('left', 'w').write('x')"), 5.0)
        assert (await world.engine.run("b", Program(code="import os; os.listdir('.')"), 5.0)).result == "[]"
        assert world.engine.pool_counts().taken == 1
    assert world.num_ready() == 0
    await until(lambda: processes() <= before)
    assert records(tmp_path) == []
