"""The manual clock wakes sleepers in order and only when their time has come."""

from __future__ import annotations

import asyncio
import math

import pytest

from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.ids import RandomIds, SeededIds


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_sleepers_wake_in_order_of_their_deadline() -> None:
    clock, woken = ManualClock(), []

    async def sleep(duration_s: float) -> None:
        await clock.sleep(duration_s)
        woken.append(duration_s)

    async with asyncio.TaskGroup() as group:
        for duration_s in (3.0, 1.0, 2.0):
            group.create_task(sleep(duration_s))
        await settle()
        clock.advance(0.999)
        await settle()
        assert woken == []
        clock.advance(1.001)
        await settle()
        assert woken == [1.0, 2.0]
        assert clock.next_deadline_s() == 3.0
        clock.advance(1.0)
    assert woken == [1.0, 2.0, 3.0]


async def test_run_for_lets_a_periodic_task_run_as_often_as_it_would() -> None:
    clock, ticks = ManualClock(), []

    async def tick() -> None:
        while True:
            await clock.sleep(1.0)
            ticks.append(clock.monotonic_s())

    task = asyncio.create_task(tick())
    await clock.run_for(3.5)
    task.cancel()
    assert ticks == [1.0, 2.0, 3.0]
    assert clock.monotonic_s() == 3.5
    assert clock.wall_s() == 1_700_000_003.5


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(1.0))
    await settle()
    assert clock.num_sleepers() == 1
    task.cancel()
    await settle()
    assert clock.num_sleepers() == 0
    assert clock.next_deadline_s() == math.inf


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="-1"):
        ManualClock().advance(-1)


def test_seeded_ids_repeat_and_random_ones_do_not() -> None:
    assert SeededIds(7).new("ep") == SeededIds(7).new("ep")
    seeded = SeededIds(7)
    assert seeded.new() != seeded.new()
    assert RandomIds().new() != RandomIds().new()
