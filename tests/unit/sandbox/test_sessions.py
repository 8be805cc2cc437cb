"""Leases over the fake engine and a manual clock: every session has one end, and the counts add up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.sessions import Holder, SessionEnd, Sessions
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import AlreadyExists, InvalidInput, MeshError, Overloaded, SandboxFailed, UnknownSession
from rollmesh.testing.fake_sandbox import FakeSandboxEngine

CONFIG = SandboxConfig(engine=Extension("fake"), sessions_max=3, ttl_s=10.0, ttl_s_max=100.0, orphan_s=3.0)


class ScriptedEngine(FakeSandboxEngine):
    """The fake engine, in which some texts simulate events of a real one."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.gate = asyncio.Event()

    async def open(
        self,
        session_id: str,
        profile: str,
        limits: Limits,
        snapshot: AsyncIterator[bytes] | None = None,
        *,
        tenant: str = "",
    ) -> None:
        if session_id == "bad":
            raise SandboxFailed("no jail")
        await super().open(session_id, profile, limits, snapshot, tenant=tenant)

    async def call(self, session_id: str, function: str, arguments: Sequence[str], wall_s: float) -> RunResult:
        match arguments:
            case ["die"]:
                await self.end(session_id)
                return RunResult(outcome=RunOutcome.EXITED, session_alive=False)
            case ["lose"]:
                await self.end(session_id)
                raise SandboxFailed("zygote gone")
            case ["wait"]:
                await self.gate.wait()
        return await super().call(session_id, function, arguments, wall_s)


def make() -> tuple[Sessions, ScriptedEngine, ManualClock]:
    clock, engine = ManualClock(), ScriptedEngine(CONFIG)
    return Sessions(engine, CONFIG, clock), engine, clock


async def open_session(sessions: Sessions, session_id: str = "s", ttl_s: float = 0, **limits: float) -> None:
    await sessions.open(session_id, profile="calc", limits=limits, ttl_s=ttl_s, owner="test")


def assert_counts_add_up(sessions: Sessions) -> None:
    counts = sessions.counts()
    assert counts.created == counts.live + sum(counts.ended.values())


async def test_use_renews_the_lease() -> None:
    sessions, _, clock = make()
    await open_session(sessions)
    for _ in range(5):
        clock.advance(9.0)
        assert await sessions.sweep() == 0
        await sessions.run("s", Program(code="1+1"), 0)
    clock.advance(9.999)
    assert await sessions.sweep() == 0
    clock.advance(0.001)
    assert await sessions.sweep() == 1
    with pytest.raises(UnknownSession):
        await sessions.run("s", Program(code="1"), 0)
    assert sessions.counts().ended[SessionEnd.EXPIRED] == 1


async def test_a_session_whose_holder_is_gone_ends_soon_unless_another_uses_it() -> None:
    sessions, engine, clock = make()
    gone, back = Holder(), Holder()
    for session_id in ("left", "taken over", "busy"):
        await sessions.open(session_id, profile="calc", limits={}, ttl_s=0, owner="test", holder=gone)
    busy = asyncio.create_task(sessions.call("busy", "call", ["wait"], 0))
    await asyncio.sleep(0)
    sessions.release_holder(gone)
    sessions.set_holder("taken over", back)
    await sessions.call("taken over", "call", ["1+1"], 0)
    clock.advance(3.0)
    assert await sessions.sweep() == 1
    assert set(sessions.owners()) == {"taken over", "busy"}
    engine.gate.set()
    await busy  # it ended after its holder and has the same remaining time as the other
    clock.advance(2.9)
    assert await sessions.sweep() == 0
    clock.advance(0.1)
    assert await sessions.sweep() == 1
    assert set(sessions.owners()) == {"taken over"}
    assert_counts_add_up(sessions)


async def test_lease_cannot_run_out_during_use() -> None:
    sessions, engine, clock = make()
    await open_session(sessions)
    calling = asyncio.create_task(sessions.call("s", "call", ["wait"], 0))
    await asyncio.sleep(0)
    clock.advance(1000.0)
    assert await sessions.sweep() == 0
    engine.gate.set()
    await calling
    assert await sessions.sweep() == 0
    clock.advance(10.0)
    assert await sessions.sweep() == 1


async def test_open_run_and_close_keep_their_order_without_waiting() -> None:
    sessions, _, _ = make()
    tasks = [
        asyncio.create_task(open_session(sessions)),
        asyncio.create_task(sessions.run("s", Program(code="1+1"), 0)),
        asyncio.create_task(sessions.close("s")),
        asyncio.create_task(sessions.run("s", Program(code="1+1"), 0)),
    ]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[1], RunResult)
    assert isinstance(done[3], UnknownSession)


async def test_commands_queued_on_an_open_that_fails_are_refused() -> None:
    sessions, _, _ = make()
    opening = asyncio.create_task(open_session(sessions, "bad"))
    running = asyncio.create_task(sessions.run("bad", Program(code="1"), 0))
    done = await asyncio.gather(opening, running, return_exceptions=True)
    assert [type(error) for error in done] == [SandboxFailed, UnknownSession]
    assert_counts_add_up(sessions)


@pytest.mark.parametrize(("text", "end"), [("die", SessionEnd.EXITED), ("lose", SessionEnd.LOST)])
async def test_exit_of_a_program_and_lost_jail_are_distinguished(text: str, end: SessionEnd) -> None:
    sessions, _, _ = make()
    await open_session(sessions)
    try:
        await sessions.call("s", "call", [text], 0)
    except SandboxFailed:
        assert end is SessionEnd.LOST
    assert {key: number for key, number in sessions.counts().ended.items() if number} == {end: 1}


async def test_cancelled_command_ends_its_session() -> None:
    sessions, _, _ = make()
    await open_session(sessions)
    calling = asyncio.create_task(sessions.call("s", "call", ["wait"], 0))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait({calling})
    assert sessions.counts().live == 0
    assert_counts_add_up(sessions)


async def test_bad_requests_are_refused_without_a_session() -> None:
    sessions, _, _ = make()
    for arguments, field, message in (
        ({"session_id": ""}, "session_id", "must not be empty, got ''; use the episode's id"),
        ({"ttl_s": 101.0}, "ttl_s", r"must be in \[0, 100\], got 101.0"),
        ({"memory_bytes": 2.0**40}, "limits.memory_bytes", r"must be in \[0, 134217728\], the profile's limit, got"),
    ):
        with pytest.raises(InvalidInput, match=f"`{field}` {message}") as caught:
            await open_session(sessions, **{"session_id": "s", **arguments})  # type: ignore[arg-type]
        assert [violation.field for violation in caught.value.violations] == [field]
    await open_session(sessions, memory_bytes=1e6, cpu_s=0.5)
    with pytest.raises(AlreadyExists, match="by 'test'"):
        await open_session(sessions)
    with pytest.raises(InvalidInput, match=r"`wall_s` must be in \[0, 2\], the session's limit, got 3"):
        await sessions.run("s", Program(code="1"), 3)
    for path in ("../x", "/etc/passwd", "a/../../b", ""):
        with pytest.raises(InvalidInput, match="`paths` must have relative paths"):
            await sessions.get_files("s", [path])
    assert (sessions.counts().created, sessions.counts().live) == (1, 1)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "1+1", "die", "lose", "close", "advance", "no function"]),
        st.sampled_from(["a", "b", "c", "d", "bad"]),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_counts_add_up_at_every_moment(actions: list[tuple[str, str]]) -> None:
    async def play() -> None:
        sessions, engine, clock = make()
        for action, session_id in actions:
            try:
                match action:
                    case "open":
                        await open_session(sessions, session_id)
                    case "close":
                        await sessions.close(session_id)
                    case "advance":
                        clock.advance(6.0)
                        await sessions.sweep()
                    case "no function":
                        await sessions.call(session_id, "solve", [], 0)
                    case text:
                        await sessions.call(session_id, "call", [text], 0)
            except (UnknownSession, AlreadyExists, Overloaded, SandboxFailed, InvalidInput) as refused:
                assert isinstance(refused, MeshError)
            assert_counts_add_up(sessions)
            assert set(sessions.owners()) == set(engine._files), "the engine holds exactly the live sessions"

    asyncio.run(play())


async def test_a_command_for_too_many_files_is_refused_with_their_number() -> None:
    sessions, _, _ = make()
    await open_session(sessions)
    with pytest.raises(InvalidInput, match="`paths` must have at most 4096 entries, got 5000"):
        await sessions.get_files("s", [f"f{number}" for number in range(5000)])
    await sessions.put_files("s", {f"f{number}": b"" for number in range(4096)})
