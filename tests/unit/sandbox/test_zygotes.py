"""Zygotes are started once for all callers, whichever of them are cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollmesh.sandbox_runtime.mechanisms import IsolationPlan
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engines.zygote_process import ZygoteProcess
from rollmesh.services.sandbox.engines.zygotes import STARTS_MAX, Zygotes
from rollmesh.shared.error_base import Cancelled
from rollmesh.shared.errors import SandboxFailed

LIMIT_S = 20.0


class Launchers:
    """Launchers whose starts end when the test allows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = 0
        self.asked, self.ready = asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None
        self.ends_at_once = False
        self.recorded: set[int] = set()

    async def start(self, *_: Any) -> Launched:
        self.begun += 1
        self.asked.set()
        await self.ready.wait()
        if self.failure is not None:
            raise self.failure
        launched = Launched(self.begun)
        launched.alive = not self.ends_at_once
        return launched

    def record_launcher(self, pid: int) -> None:
        self.recorded.add(pid)

    def forget_launcher(self, pid: int) -> None:
        self.recorded.discard(pid)


class Launched:
    def __init__(self, pid: int) -> None:
        self.pid, self.alive, self.num_sessions = pid, True, 0

    async def close(self) -> None:
        self.alive = False


@pytest.fixture
async def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launchers:
    made = Launchers(tmp_path)
    monkeypatch.setattr(ZygoteProcess, "start", made.start)
    return made


def zygotes(launchers: Launchers) -> Zygotes:
    made = Zygotes(SandboxConfig(), launchers)  # type: ignore[arg-type]
    made.plan = object.__new__(IsolationPlan)
    return made


async def test_a_cancelled_caller_does_not_end_the_start_for_others(launchers: Launchers) -> None:
    made = zygotes(launchers)
    first, second = (asyncio.create_task(made.get("python")) for _ in range(2))
    await launchers.asked.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    launchers.ready.set()
    assert (await second).pid == 1
    assert launchers.begun == 1
    await made.close()
    assert launchers.recorded == set()


async def test_a_start_that_no_caller_waits_for_is_used_by_the_next(launchers: Launchers) -> None:
    made = zygotes(launchers)
    only = asyncio.create_task(made.get("python"))
    await launchers.asked.wait()
    only.cancel()
    await asyncio.wait([only])
    launchers.ready.set()
    assert (await made.get("python")).pid == 1
    await made.close()


async def test_a_failed_start_fails_for_all_its_callers_and_is_tried_again(launchers: Launchers) -> None:
    made = zygotes(launchers)
    launchers.failure = SandboxFailed("no")
    launchers.ready.set()
    failed = await asyncio.gather(made.get("python"), made.get("python"), return_exceptions=True)
    assert [*failed] == [launchers.failure] * 2
    launchers.failure = None
    zygote = await made.get("python")
    zygote.alive = False  # type: ignore[misc]
    assert (await made.get("python")).pid == 3
    await made.close()


async def test_a_close_ends_a_start_and_its_callers(launchers: Launchers) -> None:
    made = zygotes(launchers)
    waiting = asyncio.create_task(made.get("python"))
    await launchers.asked.wait()
    await made.close()
    with pytest.raises(Cancelled, match="the start of the zygote of profile python was cancelled"):
        await waiting


async def test_launchers_that_end_at_once_fail_the_caller_after_a_limited_number(launchers: Launchers) -> None:
    made = zygotes(launchers)
    launchers.ends_at_once = True
    launchers.ready.set()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(
            SandboxFailed, match=r"profile python ended 3 times as soon as .*zygote-python.log"
        ) as caught:
            await made.get("python")
    assert caught.value.retryable
    assert launchers.begun == STARTS_MAX
    await made.close()


async def test_no_zygote_starts_after_a_close(launchers: Launchers) -> None:
    made = zygotes(launchers)
    launchers.ready.set()
    await made.close()
    with pytest.raises(SandboxFailed, match="closed"):
        await made.get("python")
    assert launchers.begun == 0
