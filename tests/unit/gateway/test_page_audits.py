"""Audits of the page: one at a time, at most one per interval, and only if there is something new."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmesh.services.gateway.page.audits import Audits
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import DeadlineExceeded


class Auditor:
    """Counts the audits; each waits until it may end."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.may_end = asyncio.Event()
        self.num_running = 0
        self.fails = False

    async def __call__(self, run: str, heads: Sequence[tuple[str, LedgerHead]]) -> bytes:
        self.runs.append(run)
        self.num_running += 1
        assert self.num_running == 1, "two audits at once"
        await self.may_end.wait()
        self.num_running -= 1
        if self.fails:
            raise DeadlineExceeded("it took too long")
        return b'{"holds": true}'


class World:
    """Audits whose changes can be awaited."""

    def __init__(self, folder: Path, every_s: float = 60.0) -> None:
        self.auditor, self.clock, self.moved = Auditor(), ManualClock(), asyncio.Event()
        self.audits = Audits(
            self.auditor, folder=folder, every_s=every_s, clock=self.clock, moved=lambda _: self.moved.set()
        )

    async def until(self, run: str, state: str) -> None:
        async with asyncio.timeout(10):
            while self.audits.verdict(run).state != state:
                self.moved.clear()
                await self.moved.wait()


async def test_audits_wait_for_each_other_and_for_the_interval(tmp_path: Path) -> None:
    world = World(tmp_path)
    for run in ("a", "b", "a"):
        world.audits.request(run)
    await world.until("a", "running")
    assert world.audits.verdict("b").state == "waiting"
    world.auditor.may_end.set()
    await world.until("b", "done")
    assert world.auditor.runs == ["a", "b"]
    assert msgspec.json.decode(msgspec.json.encode(world.audits.verdict("a")))["report"] == {"holds": True}
    assert world.audits.request("a").next_in_s == 60.0
    world.clock.advance(61.0)
    world.audits.request("a")
    await world.until("a", "done")
    await world.audits.close()
    assert len(world.auditor.runs) == 3


async def test_an_unchanged_ledger_is_not_audited_again_but_a_failed_audit_is(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.auditor.may_end.set()
    world.audits.request("a", 7)
    await world.until("a", "done")
    world.clock.advance(61.0)
    assert world.audits.request("a", 7).state == "done"
    world.auditor.fails = True
    world.audits.request("a", 8)
    await world.until("a", "failed")
    assert world.audits.verdict("a").cause == "it took too long"
    world.clock.advance(61.0)
    world.auditor.fails = False
    world.audits.request("a", 8)
    await world.until("a", "done")
    assert len(world.auditor.runs) == 3
    await world.audits.close()


async def test_closing_cancels_a_running_audit(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.audits.request("a")
    await world.until("a", "running")
    async with asyncio.timeout(10):
        await world.audits.close()


async def test_without_an_interval_there_is_no_audit(tmp_path: Path) -> None:
    world = World(tmp_path, every_s=0.0)
    assert "rollmesh audit" in world.audits.request("a").cause
    assert world.auditor.runs == []


async def test_an_audit_whose_process_cannot_start_has_failed(tmp_path: Path) -> None:
    async def auditor(run: str, heads: Sequence[tuple[str, LedgerHead]]) -> bytes:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    moved = asyncio.Event()
    audits = Audits(auditor, folder=tmp_path, every_s=60.0, clock=ManualClock(), moved=lambda _: moved.set())
    audits.request("a")
    async with asyncio.timeout(10):
        while audits.verdict("a").state != "failed":
            moved.clear()
            await moved.wait()
    assert "Resource temporarily unavailable" in audits.verdict("a").cause
