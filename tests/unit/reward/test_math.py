"""Mathematical equality through real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import cast

import pytest
import pytest_asyncio

from rollmesh.services.reward.config import ScorerConfig, build_scorer
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.reward.scorers.math import MathScorer
from rollmesh.services.reward.worker_pool import WorkerPool
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Outcome
from rollmesh.shared.errors import ScorerFailed

from .builders import item, rewards_by

SLOW = "$9^{9^{9^9}}$"
"""Short to write; sympy does not come back from it within any limit we would set."""


class MathPool(WorkerPool):
    """Workers that compare mathematical expressions."""

    async def equal(self, answers: list[str], text: str) -> bool:
        reply = await self.ask({"answers": answers}, text)
        return reply is not None and reply["equal"]


def pool(compare_s_max: float = 20.0) -> MathPool:
    module = "rollmesh.services.reward.math_worker"
    return MathPool(
        module, "math", num_workers=1, compare_s_max=compare_s_max, start_s_max=60.0, memory_bytes_max=4 << 30
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer() -> AsyncIterator[MathScorer]:
    made: MathScorer = SCORERS.make(Extension("math", {"pattern": "", "compare_s_max": 20.0}))
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("answer", "said", "value"),
    [
        ("1/2", "0.5", 1.0),
        ("\\frac{1}{2}", "1/2", 1.0),
        ("1000", "1,000", 1.0),
        ("1,000", "1000", 1.0),
        ("42", "so it is \\boxed{42}", 1.0),
        ("42", "42.0", 1.0),
        ("-5", "5", 0.0),
        ("x+1", "$1+x$", 1.0),
        ("x+1", "$x-1$", 0.0),
        ("3.14159", "3.15", 0.0),
        ("7", "I do not know", 0.0),
        ("7", "", 0.0),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_math_equality(scorer: MathScorer, answer: str, said: str, value: float) -> None:
    assert (await scorer.score(item(said, answer=answer))).value == value


@pytest.mark.asyncio(loop_scope="module")
async def test_an_unreadable_answer_key_is_a_failure_and_not_a_zero(scorer: MathScorer) -> None:
    with pytest.raises(ScorerFailed, match="accepted answer of the key"):
        await scorer.score(item("7", answer="?"))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_key_is_not_in_the_evidence(scorer: MathScorer) -> None:
    assert "4711" not in (await scorer.score(item("12", answer="4711"))).evidence


async def test_an_answer_beyond_the_limit_is_wrong_and_the_next_one_gets_a_fresh_worker() -> None:
    compared = pool(compare_s_max=0.5)
    try:
        assert not await compared.equal(["7"], SLOW)
        assert await compared.equal(["1/2"], "0.5")
    finally:
        await compared.close()


async def test_a_key_beyond_the_limit_is_an_error_of_the_task() -> None:
    compared = pool(compare_s_max=0.5)
    try:
        with pytest.raises(ScorerFailed, match="answer of the key needs more than 0.5 s of CPU"):
            await compared.equal([SLOW], "7")
    finally:
        await compared.close()


async def test_a_key_that_crashes_its_worker_is_an_error_with_this_cause() -> None:
    compared = pool(compare_s_max=30.0)
    try:
        assert await compared.equal(["8"], "8.0")
        (worker,) = compared._idle
        worker.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(compared.equal(["7"], "7"))
        worker.send_signal(signal.SIGSEGV)
        worker.send_signal(signal.SIGCONT)
        with pytest.raises(ScorerFailed, match=r"answer of the key ends the process that reads it \(status -11\)"):
            await waiting
    finally:
        await compared.close()


BUSY = """
import sys, time
from rollmesh.services.reward import math_worker

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass

class Busy(math_worker.Comparer):
    def _read(self, key):
        print(key, file=sys.stderr)
        work(float(key))
        return float(key), ""

    def _equal(self, key, value, said, message):
        work(float(said))
        return True

math_worker.Comparer = Busy
math_worker.main()
"""


@pytest.mark.parametrize(
    ("key_s", "text_s", "lines", "status"),
    [
        (0.6, 0.6, ["key", "equal", "key", "equal"], 0),
        (0.6, 3.0, ["key"], -signal.SIGPROF),
        (3.0, 0.1, [], -signal.SIGPROF),
    ],
)
def test_the_cpu_time_of_the_key_is_not_that_of_the_answer(
    key_s: float, text_s: float, lines: list[str], status: int
) -> None:
    request = {"answers": [str(key_s)], "text": str(text_s), "cpu_s": 1.0}
    done = subprocess.run(
        [sys.executable, "-c", BUSY, str(4 << 30)],
        input=f"{json.dumps(request)}\n" * 2,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status
    assert [next(iter(json.loads(line))) for line in done.stdout.splitlines()] == ["ready", *lines]
    assert done.stderr.split() == [str(key_s)], "a key is read once"


@pytest.mark.parametrize("text", ["9" * 8000, "(" * 60 + "7", "1/0", "\\frac{0}{0}", "\ud800", "7\0"])
@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_cannot_be_compared_is_wrong(scorer: MathScorer, text: str) -> None:
    assert (await scorer.score(item(text, answer="7"))).value == 0.0


async def test_time_in_which_a_worker_does_not_run_does_not_count() -> None:
    compared = pool(compare_s_max=0.5)
    try:
        assert await compared.equal(["8"], "8.0")
        (worker,) = compared._idle
        worker.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(compared.equal(["8"], "8.00"))
        done, _ = await asyncio.wait({waiting}, timeout=1.0)
        assert not done
        worker.send_signal(signal.SIGCONT)
        assert await waiting
    finally:
        await compared.close()


def test_the_timeout_of_the_entry_limits_the_cpu_time() -> None:
    made: MathScorer = SCORERS.make(Extension("math", {}))
    made.use_timeout(1.5)
    assert made._pool.compare_s_max == 1.5
    made.use_timeout(30.0)
    assert made._pool.compare_s_max == 1.5


async def test_an_answer_longer_than_a_line_of_the_worker_is_wrong() -> None:
    compared = pool()
    try:
        assert not await compared.equal(["7"], "\u4e2d" * 200_000)
    finally:
        await compared.close()


async def test_many_answers_beyond_the_limit_at_once_are_zeros_although_they_wait_longer_than_the_timeout() -> None:
    made = build_scorer(ScorerConfig(name="math", timeout_s=0.5), None)
    assert made.timeout_s is None, "the engine would count the wait for a worker"
    try:
        scored = await asyncio.gather(*(rewards_by(made, item(SLOW, answer="7")) for _ in range(3)))
    finally:
        await cast(MathScorer, made.scorer).close()
    assert [(reward.value, reward.outcome) for (reward,) in scored] == [(0.0, Outcome.OK)] * 3


async def test_a_cancelled_comparison_never_answers_the_next_one() -> None:
    compared = pool()
    try:
        assert await compared.equal(["8"], "8.0")
        stuck = asyncio.create_task(compared.equal(["7"], SLOW))
        await asyncio.sleep(0)
        assert not compared._idle, "the worker has been asked"
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        assert not await compared.equal(["8"], "9")
        assert await compared.equal(["8"], "8.0")
    finally:
        await compared.close()


def test_comparing_works_outside_the_main_thread() -> None:
    found: list[bool] = []

    async def compare() -> None:
        compared = pool()
        try:
            found.append(await compared.equal(["1/2"], "0.5"))
        finally:
            await compared.close()

    thread = threading.Thread(target=lambda: asyncio.run(compare()))
    thread.start()
    thread.join(60)
    assert found == [True]


PARENT = """
import asyncio
from rollmesh.services.reward.worker_pool import WorkerPool

async def main():
    module = "rollmesh.services.reward.math_worker"
    pool = WorkerPool(module, "math", num_workers=1, compare_s_max=60.0, start_s_max=60.0, memory_bytes_max=4 << 30)
    await pool.ask({"answers": ["1"]}, "1")
    print(pool._idle[0].pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_worker_that_stands_still_ends_with_its_killed_parent() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    worker = int(await parent.stdout.readline())
    death = os.pidfd_open(worker)
    os.kill(worker, signal.SIGSTOP)
    parent.kill()
    await parent.wait()
    try:
        readable, _, _ = await asyncio.to_thread(select.select, [death], [], [], 20.0)
    finally:
        os.close(death)
    assert readable
