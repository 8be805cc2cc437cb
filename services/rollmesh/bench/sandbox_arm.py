"""What `bench sandbox` measures, one contender at a time: executions by so many at once, their latency and what they cost in CPU.

CPU is that of this process and of all below it, with the children that each has waited for. A session is waited for by its zygote, what
a session starts by the session, and the kernel waits for what a pid namespace leaves in the name of its pid 1: so a dead
grandchild's seconds are in the sum as soon as the one that stands at the top of its line still lives. Kernel threads are in nobody's sum: part of
what a namespace costs is cleared away by them later; they are counted apart, for the whole machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollmesh.bench.cpu_profile import tree_cpu_s

CODE = "print(6 * 7)"
PRINTED = "42"
_KTHREADD = "2"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Arm(Protocol):
    """One way of executing `CODE`."""

    async def prepare(self, num: int) -> None:
        """Before a lap of `num` at once; not measured."""
        ...

    async def once(self, worker: int) -> float:
        """One execution by one of the `num`, and whatever cleaning up it takes; seconds until its output was there."""
        ...

    async def settle(self) -> None:
        """After a lap: until nothing of its executions is left; live sessions end here."""
        ...


@dataclass(frozen=True, slots=True)
class Lap:
    """Some seconds of one arm."""

    latencies_s: list[float]
    wall_s: float
    cpu_s: float
    kernel_s: float

    @property
    def num(self) -> int:
        return len(self.latencies_s)


async def lap(arm: Arm, num: int, seconds: float) -> Lap:
    """`num` workers that execute one after another for so long."""
    await arm.prepare(num)
    cpu_s, kernel, begin_s = tree_cpu_s(), _kernel_ticks(), time.perf_counter()
    until_s = begin_s + seconds
    latencies: list[float] = []

    async def work(worker: int) -> None:
        while not latencies or time.perf_counter() < until_s:
            latencies.append(await arm.once(worker))

    async with asyncio.TaskGroup() as group:
        for worker in range(num):
            group.create_task(work(worker))
    wall_s = time.perf_counter() - begin_s
    spent = Lap(latencies, wall_s, tree_cpu_s() - cpu_s, _since_s(kernel))
    await arm.settle()
    return spent


def _kernel_ticks() -> dict[str, int]:
    """CPU time of each of the kernel's own threads, for whomever they work."""
    ticks = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == _KTHREADD:
                ticks[path.name] = int(fields[12])
    return ticks


def _since_s(before: dict[str, int]) -> float:
    """CPU seconds of those threads that are there now; workers come and go, and take their figures along."""
    return sum(ticks - before.get(pid, 0) for pid, ticks in _kernel_ticks().items()) / _TICKS_PER_S


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
