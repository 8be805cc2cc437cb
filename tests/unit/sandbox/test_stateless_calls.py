"""Shared sessions over scripted engines: one result per call, whatever happens to sessions, and no session for two
tenants."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import msgspec
import pytest

from rollmesh.services.sandbox.config import SandboxConfig, SharedConfig, TenantQuota, TenantsConfig
from rollmesh.services.sandbox.engine import CallsDone, FunctionCall, RunOutcome, RunResult
from rollmesh.services.sandbox.sessions import SessionEnd, Sessions
from rollmesh.services.sandbox.stateless_calls import StatelessCalls
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ids import SeededIds
from rollmesh.shared.errors import Draining, InvalidInput, MeshError, Overloaded, SandboxFailed, UnknownSession
from rollmesh.testing.fake_sandbox import FakeSandboxEngine

CONFIG = SandboxConfig(
    engine=Extension("fake"), sessions_max=8, shared=SharedConfig(sessions_max=2, calls_max=100, calls_at_once=4)
)
TIME_OUT = RunResult(outcome=RunOutcome.TIME)
DIED = RunResult(outcome=RunOutcome.EXITED, session_alive=False)


class CallEngine(FakeSandboxEngine):
    """Some texts simulate what happens to a session. `ran` has the calls of each request, by session."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.ran: list[tuple[str, tuple[str, ...]]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def call_all(self, session_id: str, calls: Sequence[FunctionCall], slice_s: float) -> CallsDone:
        texts = tuple(call.arguments[0] for call in calls)
        self.ran.append((session_id, texts))
        await self.gate.wait()
        if "lose" in texts:
            await self.end(session_id)
            raise SandboxFailed("zygote gone")
        if "bug" in texts:
            raise RuntimeError("a bug")
        if "die" in texts:
            await self.end(session_id)
            return CallsDone(end=DIED)
        for number, text in enumerate(texts):
            if text in ("slow", "dirty"):
                done = await super().call_all(session_id, calls[:number], slice_s)
                last = TIME_OUT if text == "slow" else RunResult(outcome=RunOutcome.OK)
                return CallsDone(results=[*done.results, last], changed="" if text == "slow" else "file x")
        return await super().call_all(session_id, calls, slice_s)


class Bench:
    def __init__(self, config: SandboxConfig = CONFIG) -> None:
        self.clock, self.engine = ManualClock(), CallEngine(config)
        self.sessions = Sessions(self.engine, config, self.clock)
        self.calls = StatelessCalls(self.sessions, config, clock=self.clock, ids=SeededIds(1))

    async def call(self, text: str, tenant: str = "run") -> RunResult | MeshError:
        result: asyncio.Future[RunResult | MeshError] = asyncio.get_running_loop().create_future()
        self.calls.submit("calc", tenant, "call", [text], 0.0, result.set_result)
        async with asyncio.timeout(5):
            return await result

    async def texts(self, *texts: str, tenant: str = "run") -> list[str]:
        results = await asyncio.gather(*(self.call(text, tenant) for text in texts))
        return [r.result or r.outcome.value if isinstance(r, RunResult) else r.reason for r in results]

    @property
    def used(self) -> list[str]:
        return list(dict.fromkeys(session for session, _ in self.engine.ran))


async def test_calls_at_the_same_time_are_one_request_and_one_session() -> None:
    bench = Bench()
    assert await bench.texts("1+1", "2+2", "3+3") == ["2", "4", "6"]
    assert await bench.texts("4+4") == ["8"]
    assert [texts for _, texts in bench.engine.ran] == [("1+1", "2+2", "3+3"), ("4+4",)]
    assert len(bench.used) == 1
    assert bench.sessions.counts().created == 1


async def test_no_two_tenants_share_a_session() -> None:
    bench = Bench()
    for _ in range(3):
        await asyncio.gather(bench.texts("1+1", "2+2", tenant="a"), bench.texts("3+3", "4+4", tenant="b"))
    assert len(bench.used) == 2
    assert {tuple(sorted(set(texts) & {"1+1"})) for _, texts in bench.engine.ran} == {("1+1",), ()}
    for session in bench.used:
        mine = {text for used, texts in bench.engine.ran for text in texts if used == session}
        assert mine in ({"1+1", "2+2"}, {"3+3", "4+4"})


async def test_a_session_ends_after_its_number_of_calls() -> None:
    bench = Bench(msgspec.structs.replace(CONFIG, shared=SharedConfig(calls_max=8, calls_at_once=4)))
    for _ in range(4):
        await bench.texts("1+1", "2+2", "3+3", "4+4")
    assert len(bench.used) == 2
    assert bench.sessions.counts().ended[SessionEnd.CLOSED] == 2


@pytest.mark.parametrize(("text", "outcome"), [("slow", "time"), ("dirty", "ok")])
async def test_a_call_that_reaches_a_limit_or_leaves_state_ends_the_session_before_the_next_call(
    text: str, outcome: str
) -> None:
    bench = Bench()
    assert await bench.texts("1+1", text, "3+3", "4+4") == ["2", outcome, "6", "8"]
    first, second = bench.used
    assert bench.engine.ran == [(first, ("1+1", text, "3+3", "4+4")), (second, ("3+3", "4+4"))]
    assert bench.sessions.counts().ended[SessionEnd.CLOSED] == 1


async def test_only_the_call_that_ends_a_session_alone_has_its_end_as_result() -> None:
    bench = Bench()
    assert await bench.texts("1+1", "die", "3+3") == ["2", "exited", "6"]
    assert [texts for _, texts in bench.engine.ran] == [("1+1", "die", "3+3"), ("1+1",), ("die",), ("3+3",)]
    dead = [session for session, texts in bench.engine.ran if "die" in texts]
    assert len(set(dead)) == 2
    assert bench.engine.ran[2][0] != bench.engine.ran[1][0]


async def test_a_call_that_is_alone_in_a_used_session_is_repeated_before_it_is_blamed() -> None:
    bench = Bench()
    await bench.texts("1+1")
    assert await bench.texts("die") == ["exited"]
    assert [texts for _, texts in bench.engine.ran] == [("1+1",), ("die",), ("die",)]


async def test_a_lost_session_fails_its_calls_as_infra_failures_and_no_others() -> None:
    bench = Bench()
    assert await bench.texts("1+1", "lose") == ["SANDBOX_FAILED", "SANDBOX_FAILED"]
    assert await bench.texts("2+2") == ["4"]


async def test_a_bug_fails_its_calls_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    assert await bench.texts("1+1", "2+2", "3+3", "bug", "5+5") == [*["INTERNAL"] * 4, "10"]
    assert "a bug" in caplog.text
    assert bench.calls.num_calls == 0


async def test_an_expired_session_is_replaced() -> None:
    bench = Bench()
    await bench.texts("1+1")
    bench.clock.advance(CONFIG.shared.idle_s)
    assert await bench.sessions.sweep() == 1
    assert bench.sessions.counts().live == 0
    assert await bench.texts("2+2") == ["4"]
    assert bench.sessions.counts().ended[SessionEnd.EXPIRED] == 1


async def test_waiting_calls_start_another_session_up_to_the_limit() -> None:
    bench = Bench()
    bench.engine.gate.clear()
    waiting = [asyncio.ensure_future(bench.texts(f"{n}+1")) for n in range(14)]
    for _ in range(5):
        await asyncio.sleep(0)
        await bench.clock.run_for(CONFIG.shared.slice_s)
    assert [len(texts) for _, texts in bench.engine.ran] == [4, 4]
    assert len(bench.used) == CONFIG.shared.sessions_max
    bench.engine.gate.set()
    assert await asyncio.gather(*waiting) == [[str(n + 1)] for n in range(14)]
    assert len(bench.used) == CONFIG.shared.sessions_max


async def test_without_a_slot_for_another_session_the_calls_wait_for_the_first() -> None:
    bench = Bench(msgspec.structs.replace(CONFIG, tenants=TenantsConfig(default=TenantQuota(sessions_max=1))))
    bench.engine.gate.clear()
    waiting = [asyncio.ensure_future(bench.texts(f"{n}+1")) for n in range(6)]
    for _ in range(5):
        await asyncio.sleep(0)
        await bench.clock.run_for(CONFIG.shared.slice_s)
    bench.engine.gate.set()
    assert await asyncio.gather(*waiting) == [[str(n + 1)] for n in range(6)]
    assert len(bench.used) == 1


async def test_without_any_slot_the_calls_are_rejected_and_may_be_retried() -> None:
    bench = Bench(msgspec.structs.replace(CONFIG, tenants=TenantsConfig(default=TenantQuota(sessions_max=1))))
    await bench.sessions.open("own", profile="calc", limits={}, ttl_s=0, owner="test", tenant="run")
    assert await bench.texts("1+1") == ["OVERLOADED"]
    await bench.sessions.close("own")
    assert await bench.texts("1+1") == ["2"]


async def test_quotas_of_commands_and_of_the_queue_count_calls() -> None:
    for config, message in (
        (
            msgspec.structs.replace(CONFIG, tenants=TenantsConfig(default=TenantQuota(commands_inflight_max=2))),
            "tenant 'run'",
        ),
        (msgspec.structs.replace(CONFIG, shared=SharedConfig(queued_max=2)), "queued_max"),
    ):
        bench = Bench(config)
        waiting = [asyncio.ensure_future(bench.call("1+1")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=message):
            await bench.call("2+2")
        await asyncio.gather(*waiting)
        assert await bench.texts("2+2") == ["4"]


async def test_bad_calls_are_rejected_with_the_remedy() -> None:
    bench = Bench()
    with pytest.raises(InvalidInput, match=re.escape("add it to sandbox.profiles.calc.stateless")):
        bench.calls.submit("calc", "run", "solve", ["1"], 0.0, lambda _: None)
    with pytest.raises(InvalidInput, match="use the run's name"):
        await bench.call("1+1", tenant="")
    with pytest.raises(InvalidInput, match=r"`wall_s` must be in \[0, 2\]"):
        bench.calls.submit("calc", "run", "call", ["1"], 3.0, lambda _: None)
    assert bench.calls.num_calls == 0


async def test_other_commands_do_not_know_shared_sessions() -> None:
    bench = Bench()
    await bench.texts("1+1")
    (shared,) = bench.used
    with pytest.raises(UnknownSession):
        await bench.sessions.call(shared, "call", ["1+1"], 0.0)
    with pytest.raises(UnknownSession):
        await bench.sessions.put_files(shared, {"a": b""})
    with pytest.raises(UnknownSession):
        bench.sessions.renew(shared)
    await bench.sessions.close(shared)
    await bench.texts("2+2")
    assert bench.used == [shared]
    await bench.sessions.open("own", profile="calc", limits={}, ttl_s=0, owner="test", tenant="run")
    with pytest.raises(UnknownSession):
        await bench.sessions.call_all("own", [], 0.1)


async def test_drain_finishes_calls_rejects_new_ones_and_leaves_no_session() -> None:
    bench = Bench()
    waiting = asyncio.ensure_future(bench.texts("1+1", "2+2"))
    while bench.calls.num_calls < 2:  # noqa: ASYNC110 - the number has no event
        await asyncio.sleep(0)
    await bench.calls.drain()
    assert await waiting == ["2", "4"]
    with pytest.raises(Draining):
        await bench.call("3+3")
    assert bench.sessions.counts().live == 0


async def test_close_fails_waiting_calls_as_infra_failures() -> None:
    bench = Bench()
    bench.engine.gate.clear()
    waiting = asyncio.ensure_future(bench.texts(*(f"{n}+1" for n in range(6))))
    for _ in range(3):
        await asyncio.sleep(0)
    await bench.calls.close()
    assert await waiting == ["SANDBOX_FAILED"] * 6
    assert bench.calls.num_calls == 0
