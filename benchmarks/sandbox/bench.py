"""A fresh jail with its first call, and a call in a live session, against a bare fork, a bare interpreter, bubblewrap
and firejail.

All run the same line with the same interpreter, 1, 2, 8 and 32 at once. Contenders take turns, lap by lap, in one run.
The lower bound is a bare fork from a warm interpreter with the same modules: no sandbox made of processes can be
cheaper. `isolates` says what each isolates, because a ratio means little without it; see `sandbox_rivals` for details.

How to read it: CPU is the sum of all processes, including the bench itself (about 0.2 ms for ours and the fork, less
for programs that are only spawned). `kernel` is the CPU of kernel threads on the whole machine per execution: they
remove namespaces. It is meaningful only on an idle machine. Latency ends when the output has arrived. Executions/s
include the end of the session, or of all processes of a program. Targets: a fresh jail takes at most 2 times the CPU of
a bare fork, and is 3 times as fast as bubblewrap + python at 1, 1.5 times at 8; a live call 20 times; p99 below 5 times
p50 on an idle machine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import BenchTarget, Report, spread
from benchmarks.sandbox import ours, rivals
from benchmarks.sandbox.arm import Arm, SandboxLap, lap, percentile
from rollmesh.services.sandbox.config import PROFILES

AT_ONCE = (1, 2, 8, 32)
FRESH, LIVE = "fresh jail, engine", "live call, engine"
FRESH_RPC, LIVE_RPC = "fresh jail, gRPC", "live call, gRPC"
FORK, PYTHON, BWRAP, FIREJAIL = "bare fork", "bare python", "bwrap + python", "firejail + python"
ISOLATES = {
    FRESH: "all", FRESH_RPC: "all", LIVE: "all", LIVE_RPC: "all", FORK: "nothing", PYTHON: "nothing",
    BWRAP: "namespaces", FIREJAIL: "namespaces, seccomp",
}  # fmt: skip

Laps = dict[int, dict[str, list[SandboxLap]]]
"""Results by number of concurrent executions, then by arm."""


def run(quick: bool) -> Report:
    repetitions, seconds = (1, 0.3) if quick else (5, 2.0)
    report = Report(
        "sandbox", f"{repetitions} laps of {seconds} s each, in turns; `print(6 * 7)`; profile python, its modules warm"
    )
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder, rivals.adopting():
        laps = asyncio.run(_measure(Path(folder), repetitions, seconds, report.notes))
    for num, by_arm in laps.items():
        report.rows += [_row(num, name, by_arm) for name in by_arm]
    report.targets = _targets(laps)
    return report


async def _measure(folder: Path, repetitions: int, seconds: float, notes: list[str]) -> Laps:
    async with _arms(folder, notes) as arms:
        laps: Laps = {num: {name: [] for name in arms} for num in AT_ONCE}
        for arm in arms.values():
            await lap(arm, 1, 0.1)  # the first lap of each arm warms it up
        for _ in range(repetitions):
            for num, by_arm in laps.items():
                for name, arm in arms.items():
                    by_arm[name].append(await lap(arm, num, seconds))
    return laps


@asynccontextmanager
async def _arms(folder: Path, notes: list[str]) -> AsyncIterator[Mapping[str, Arm]]:
    async with AsyncExitStack() as stack:
        engine = ours.make_engine(folder / "engine")
        stack.push_async_callback(engine.close)
        await engine.start()
        link = await stack.enter_async_context(ours.Service(folder / "service"))
        fork = rivals.WarmFork(PROFILES[ours.PROFILE].preload)
        await fork.start()
        stack.push_async_callback(fork.close)
        arms: dict[str, Arm] = {
            FRESH: ours.EngineFresh(engine),
            FORK: fork,
            FRESH_RPC: ours.ServiceFresh(link),
            PYTHON: rivals.RivalProgram(rivals.BARE),
            LIVE: ours.EngineLive(engine),
            LIVE_RPC: ours.ServiceLive(link),
        }
        for name, command in ((BWRAP, rivals.BWRAP), (FIREJAIL, rivals.FIREJAIL)):
            if missing := await asyncio.to_thread(rivals.present, command):
                notes.append(f"{name} left out: {missing}")
            else:
                arms[name] = rivals.RivalProgram(command)
        yield arms


def _row(num: int, name: str, by_arm: Mapping[str, list[SandboxLap]]) -> dict[str, Any]:
    laps = by_arm[name]
    latencies = [latency for one in laps for latency in one.latencies_s]
    executions = sum(one.num for one in laps)
    return {
        "at once": num,
        "what": name,
        "isolates": ISOLATES[name],
        "executions/s": spread([one.num / one.wall_s for one in laps]),
        "p50, ms": 1e3 * percentile(latencies, 0.5),
        "p99, ms": 1e3 * percentile(latencies, 0.99),
        "CPU, ms": spread([1e3 * one.cpu_s / one.num for one in laps], 2),
        "kernel, ms": 1e3 * sum(one.kernel_s for one in laps) / executions,
        "CPU / bare fork": _cpu_ratio(by_arm, name, FORK),
        "speed / bwrap": _speed_ratio(by_arm, name, BWRAP) if BWRAP in by_arm else "",
    }


def _cpu_ratio(by_arm: Mapping[str, list[SandboxLap]], name: str, other: str) -> float:
    pairs = zip(by_arm[name], by_arm[other], strict=True)
    return statistics.median((a.cpu_s / a.num) / (b.cpu_s / b.num) for a, b in pairs)


def _speed_ratio(by_arm: Mapping[str, list[SandboxLap]], name: str, other: str) -> float:
    pairs = zip(by_arm[name], by_arm[other], strict=True)
    return statistics.median((a.num / a.wall_s) / (b.num / b.wall_s) for a, b in pairs)


def _targets(laps: Laps) -> list[BenchTarget]:
    one, eight = laps[1], laps[8]
    targets = [BenchTarget("fresh jail, CPU / bare fork, at 1", _cpu_ratio(one, FRESH, FORK), 2.0)]
    if BWRAP in one:
        targets += [
            BenchTarget(
                "fresh jail, speed / bwrap + python, at 1", _speed_ratio(one, FRESH, BWRAP), 3.0, at_most=False
            ),
            BenchTarget("the same at 8", _speed_ratio(eight, FRESH, BWRAP), 1.5, at_most=False),
            BenchTarget("live call, speed / bwrap + python, at 1", _speed_ratio(one, LIVE, BWRAP), 20.0, at_most=False),
        ]
    for name in (FRESH, LIVE):
        latencies = [latency for done in one[name] for latency in done.latencies_s]
        tail = percentile(latencies, 0.99) / percentile(latencies, 0.5)
        targets.append(BenchTarget(f"{name}, p99 / p50, at 1", tail, 5.0))
    return targets
