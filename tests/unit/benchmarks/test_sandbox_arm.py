"""What `bench sandbox` counts: latencies of each execution, and the CPU of whatever ran, orphans and dead grandchildren
included."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from benchmarks.sandbox.arm import CODE, lap, percentile
from benchmarks.sandbox.rivals import BARE, RivalProgram, WarmFork, adopting, present

BURN_S = 0.4
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass\nprint(42)"
ORPHANED = f"""
import os
reading, writing = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        import time
        while time.process_time() < {BURN_S}: pass
        os.write(writing, b"x")
        os._exit(0)
    os._exit(0)
os.read(reading, 1)
print(42)
"""


class Napping:
    """Waits for its turn and uses no CPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def prepare(self, num: int) -> None:
        self.calls.append(f"prepare {num}")

    async def once(self, worker: int) -> float:
        await asyncio.sleep(0)
        return float(worker)

    async def settle(self) -> None:
        self.calls.append("settle")


async def test_a_lap_keeps_the_latency_of_each_execution_of_all_workers() -> None:
    arm = Napping()
    done = await lap(arm, 3, 0.02)
    assert arm.calls == ["prepare 3", "settle"]
    assert set(done.latencies_s) == {0.0, 1.0, 2.0}
    assert done.num == len(done.latencies_s) >= 3
    assert done.wall_s >= 0.02


@pytest.mark.parametrize("code", [BURN, ORPHANED], ids=["a child's", "an orphan's"])
async def test_cpu_of_programs_is_counted_when_they_have_ended(code: str) -> None:
    with adopting():
        done = await lap(RivalProgram([sys.executable, "-I", "-S", "-c", code]), 1, 0.0)
    assert done.num == 1
    assert BURN_S - 0.05 <= done.cpu_s < 5 * BURN_S


async def test_cpu_of_forks_is_counted_and_their_output_checked() -> None:
    fork = WarmFork(("json",))
    await fork.start()
    try:
        begin_s = time.perf_counter()
        done = await lap(fork, 2, 0.3)
        assert done.num >= 2
        assert 0 < done.cpu_s <= 4 * (time.perf_counter() - begin_s)
    finally:
        await fork.close()


async def test_a_program_that_prints_something_else_is_no_contender() -> None:
    program = RivalProgram([sys.executable, "-I", "-S", "-c", CODE.replace("6", "5")])
    await program.prepare(1)  # it must not wait for children that other tests have left
    with pytest.raises(RuntimeError, match="instead of 42"):
        await program.once(0)


def test_a_missing_program_is_named() -> None:
    assert present(BARE) == ""
    assert present(("no-such-sandbox", *BARE)) == "no-such-sandbox is not installed"


def test_percentile_is_a_value_that_occurred() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (51.0, 100.0)
    assert percentile([3.0], 0.99) == 3.0
