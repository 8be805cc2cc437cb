"""The watchdog with a driver and a clock that the test moves: one event per stall, none for a run with progress."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.facts import SampleMeta, StepSpan
from rollmesh.services.coordinator.core.fleet import Fleet
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.services.coordinator.watchdog import Watchdog
from rollmesh.shared.domain.versions import PolicyVersion

from .driver_bench import NAMES, SPEC, Bench, bench, settle

STALL_S = 30.0


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Bench, Watchdog]]:
    """A run with published weights, no fleet, and a worker's lease."""
    async with bench() as b:
        await b.ask(m.CreateRun, spec=msgspec.structs.replace(SPEC, stall_s=STALL_S))
        attached = await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        version = PolicyVersion(policy="main", step=0, weights_digest="w")
        await b.ask(i.PublishVersion, **NAMES, trainer_epoch=attached.trainer_epoch, version=version)
        yield b, Watchdog(b.driver, Fleet(), b.clock)


async def stalls(b: Bench) -> list[f.RunStalled]:
    facts = [fact async for record in read_ledger(b.log) for fact in record.facts]
    return [fact for fact in facts if isinstance(fact, f.RunStalled)]


async def test_a_stall_is_reported_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    async with watched() as (b, watchdog):
        b.clock.advance(STALL_S - 0.1)
        await watchdog.check()
        assert not await stalls(b)
        b.clock.advance(0.1)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                await watchdog.check()
                await settle()
                b.clock.advance(1.0)
        (stall,) = await stalls(b)
        assert stall.root == "rollout"
        assert stall.cause.endswith("rollout is missing: no rollout node has joined")
        assert [stall.cause in record.message for record in caplog.records] == [True]
        assert b.core.state.stall == stall.cause


async def test_progress_ends_a_stall_and_the_next_one_is_reported() -> None:
    async with watched() as (b, watchdog):
        b.clock.advance(STALL_S)
        await watchdog.check()
        await settle()
        await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        assert b.core.state.stall, "an attach does not count as progress"
        await score_one(b)
        assert not b.core.state.stall
        await watchdog.check()
        b.clock.advance(STALL_S)
        await watchdog.check()
        await settle()
        assert len(await stalls(b)) == 2


async def score_one(b: Bench) -> None:
    (lease, *_) = (await b.acquire(1)).leases
    meta = SampleMeta(sample_id=f"{lease.episode}.0", policy="main", steps=(StepSpan(num_tokens=1),), num_tokens=1)
    report = i.EpisodeReport(
        lease_id=lease.lease_id,
        group=lease.group,
        episode=lease.episode,
        attempt=lease.attempt,
        outcome=m.EpisodeOutcome.COMPLETED,
        samples=(meta,),
    )
    await b.ask(i.ReportEpisodes, node_id="w", reports=(report,))


async def test_the_wall_clock_does_not_matter() -> None:
    """Leases, deadlines and stalls use the monotonic clock. A wall clock that jumps by a year only dates the
    records."""
    async with watched() as (b, watchdog):
        b.clock._wall_offset_s += 365 * 86400.0
        await watchdog.check()
        await settle()
        assert not await stalls(b)
        b.clock._wall_offset_s -= 3 * 365 * 86400.0
        b.clock.advance(STALL_S)
        await watchdog.check()
        await settle()
        assert len(await stalls(b)) == 1
