"""Permits to start: bounded, queued, fair between tenants, and never lost to a cancelled waiter."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.services.sandbox.starts import Starts
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import Overloaded


def make(inflight_max: int = 1, queued_max: int = 100) -> Starts:
    return Starts(inflight_max=inflight_max, queued_max=queued_max, retry_after_s=0.5, clock=ManualClock())


class Crowd:
    """Starts that hold their permit until they are released."""

    def __init__(self, starts: Starts) -> None:
        self._starts = starts
        self.order: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        """Run starts; each of the `names` begins with its tenant's letter."""
        for name in names:
            self.gates[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._open(name))
        await settle()

    async def go(self, name: str) -> None:
        self.gates[name].set()
        await self.tasks[name]
        await settle()

    async def _open(self, name: str) -> None:
        async with self._starts.permit(name[0]):
            self.order.append(name)
            await self.gates[name].wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_more_than_the_bound_start_at_a_time() -> None:
    starts = make(inflight_max=2)
    crowd = Crowd(starts)
    await crowd.come("a1", "a2", "a3", "a4")
    assert (crowd.order, starts.num_queued, starts.idle) == (["a1", "a2"], 2, False)
    await crowd.go("a2")
    assert (crowd.order, starts.num_queued) == (["a1", "a2", "a3"], 1)
    for name in ("a1", "a3", "a4"):
        await crowd.go(name)
    assert starts.idle


async def test_a_tenant_with_one_start_does_not_wait_behind_another_with_many() -> None:
    crowd = Crowd(make())
    await crowd.come(*(f"a{n}" for n in range(20)), "b0", "c0", "b1")
    for _ in range(7):
        await crowd.go(crowd.order[-1])
    assert crowd.order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]
    for task in crowd.tasks.values():
        task.cancel()


async def test_a_full_queue_rejects_with_a_back_off_time() -> None:
    starts = make(queued_max=2)
    crowd = Crowd(starts)
    await crowd.come("a1", "a2", "a3")
    with pytest.raises(Overloaded, match="2 sessions already wait for a start") as refused:
        async with starts.permit("b"):
            pass
    assert (refused.value.retry_after_s, refused.value.metadata["tenant"]) == (0.5, "b")
    await crowd.go("a1")
    await crowd.come("b1")
    assert starts.num_queued == 2
    for task in crowd.tasks.values():
        task.cancel()


async def test_cancelled_waiters_pass_on_a_permit_that_was_granted_meanwhile() -> None:
    starts = make()
    crowd = Crowd(starts)
    await crowd.come("a1", "a2", "b1", "b2")
    crowd.tasks["b1"].cancel()
    await settle()
    assert starts.num_queued == 2
    crowd.gates["a1"].set()
    await asyncio.sleep(0)  # a1 has released its permit; a2 has not run yet
    assert (crowd.order, starts.num_queued) == (["a1"], 1)
    crowd.tasks["a2"].cancel()
    await settle()
    assert crowd.order == ["a1", "b2"]
    await crowd.go("b2")
    assert starts.idle
    assert starts.num_queued == 0


async def test_a_waiter_cancelled_at_the_moment_of_a_release_is_skipped() -> None:
    starts = make()
    crowd = Crowd(starts)
    await crowd.come("a1", "a2", "a3")
    crowd.tasks["a2"].cancel()
    crowd.gates["a1"].set()
    await settle()
    assert crowd.order == ["a1", "a3"]
    await crowd.go("a3")
    assert starts.idle
