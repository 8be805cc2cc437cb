"""Measure one contender of `bench sandbox`: concurrent executions, their latency and their CPU.

CPU is the sum of this process and its descendants, with the children that each has waited for. The zygote waits for a
session, the session waits for its children, and pid 1 of a pid namespace inherits the rest. So the seconds of an exited
grandchild are in the sum while its ancestor runs. Kernel threads, which remove namespaces later, are not in the sum.
They are counted separately, for the whole machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.cpu_profile import tree_cpu_s

CODE = "print(6 * 7)"
PRINTED = "42"
_KTHREADD = "2"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Arm(Protocol):
    """One method to execute `CODE`."""

    async def prepare(self, num: int) -> None:
        """Prepare a lap of `num` concurrent executions; not measured."""
        ...

    async def once(self, worker: int) -> float:
        """Execute once in one of the `num` workers, clean up, and return the seconds until the output arrived."""
        ...

    async def settle(self) -> None:
        """End live sessions, and wait until all processes of the lap have exited."""
        ...


@dataclass(frozen=True, slots=True)
class SandboxLap:
    """The result of one lap of one arm."""

    latencies_s: list[float]
    wall_s: float
    cpu_s: float
    kernel_s: float

    @property
    def num(self) -> int:
        return len(self.latencies_s)


async def lap(arm: Arm, num: int, seconds: float) -> SandboxLap:
    """Run `num` workers for `seconds`, each with one execution after another."""
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
    spent = SandboxLap(latencies, wall_s, tree_cpu_s() - cpu_s, _since_s(kernel))
    await arm.settle()
    return spent


def _kernel_ticks() -> dict[str, int]:
    """Return the CPU time of each kernel thread."""
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
    """Return the CPU seconds of the current threads; a thread that has exited is not counted."""
    return sum(ticks - before.get(pid, 0) for pid, ticks in _kernel_ticks().items()) / _TICKS_PER_S


def percentile(values: list[float], share: float) -> float:
    """Return the quantile `share` of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
