"""Quotas of tenants: requests beyond a quota are rejected with the tenant's name, ended ones do not count, and other
tenants are not affected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.config import SandboxConfig, TenantQuota, TenantsConfig
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import Overloaded, SandboxFailed, UnknownSession
from rollmesh.testing.fake_sandbox import FakeSandboxEngine

CONFIG = SandboxConfig(
    engine=Extension("fake"),
    retry_after_s=0.25,
    tenants=TenantsConfig(
        default=TenantQuota(sessions_max=2),
        by_name={"busy": TenantQuota(starts_inflight_max=1, commands_inflight_max=2)},
    ),
)


class GatedEngine(FakeSandboxEngine):
    """Opens of `slow` sessions and calls wait for the gate; `bad` ones fail."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.gate = asyncio.Event()

    async def open(self, session_id: str, profile: str, limits: Limits, *args: object, **kwargs: object) -> None:
        if session_id.startswith("bad"):
            raise SandboxFailed("no jail")
        if session_id.startswith("slow"):
            await self.gate.wait()
        await super().open(session_id, profile, limits)

    async def call(self, session_id: str, function: str, arguments: Sequence[str], wall_s: float) -> RunResult:
        await self.gate.wait()
        return await super().call(session_id, function, arguments, wall_s)


def make() -> tuple[Sessions, GatedEngine, ManualClock]:
    engine, clock = GatedEngine(CONFIG), ManualClock()
    return Sessions(engine, CONFIG, clock), engine, clock


async def open_session(sessions: Sessions, session_id: str, tenant: str) -> None:
    await sessions.open(session_id, profile="calc", limits={}, ttl_s=0, owner="test", tenant=tenant)


async def test_live_sessions_of_a_tenant_are_bounded_and_it_is_named() -> None:
    sessions, _, _ = make()
    await open_session(sessions, "a1", "a")
    await open_session(sessions, "a2", "a")
    with pytest.raises(Overloaded, match="tenant 'a' has reached its quota of 2 sessions") as refused:
        await open_session(sessions, "a3", "a")
    assert (refused.value.retry_after_s, refused.value.metadata) == (0.25, {"tenant": "a"})
    await open_session(sessions, "b1", "b")
    await sessions.close("a1")
    await open_session(sessions, "a3", "a")
    assert sessions.counts().created == 4, "a refused one was never admitted"


async def test_any_end_of_a_session_frees_its_quota() -> None:
    sessions, _, clock = make()
    for session_id in ("bad1", "bad2", "bad3"):
        with pytest.raises(SandboxFailed):
            await open_session(sessions, session_id, "a")
    for _ in range(3):
        await open_session(sessions, "one", "a")
        await open_session(sessions, "two", "a")
        clock.advance(CONFIG.ttl_s)
        assert await sessions.sweep() == 2


async def test_starts_of_a_tenant_are_bounded_while_they_last() -> None:
    sessions, engine, _ = make()
    slow = asyncio.create_task(open_session(sessions, "slow", "busy"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="reached its quota of 1 starts in flight"):
        await open_session(sessions, "next", "busy")
    await open_session(sessions, "other", "other")
    engine.gate.set()
    await slow
    await open_session(sessions, "next", "busy")


async def test_commands_of_a_tenant_are_bounded_and_closing_is_always_possible() -> None:
    sessions, engine, _ = make()
    for name in ("s", "t"):
        await open_session(sessions, name, "busy")
    calls = [asyncio.create_task(sessions.call("s", "call", ["1+1"], 0)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="reached its quota of 2 commands in flight"):
        await sessions.call("t", "call", ["1+1"], 0)
    with pytest.raises(UnknownSession):
        await sessions.call("unknown", "call", ["1+1"], 0)
    await sessions.close("t")
    engine.gate.set()
    assert [(await call).result for call in calls] == ["2", "2"]
    assert (await sessions.call("s", "call", ["1+1"], 0)).result == "2"


async def test_renewing_prolongs_a_lease_without_a_command() -> None:
    sessions, _, clock = make()
    await open_session(sessions, "s", "a")
    for _ in range(3):
        clock.advance(CONFIG.ttl_s - 1)
        sessions.renew("s")
        assert await sessions.sweep() == 0
    clock.advance(CONFIG.ttl_s)
    assert await sessions.sweep() == 1
    with pytest.raises(UnknownSession):
        sessions.renew("s")


def test_a_negative_quota_is_refused() -> None:
    with pytest.raises(ValueError, match="`sessions_max` must be >= 0, got -1"):
        TenantQuota(sessions_max=-1)
