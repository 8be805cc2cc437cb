"""A pool of worker processes that compare mathematical expressions. Workers start on demand and are replaced after a timeout.

Invariant: a worker in `_idle` has answered all its requests. A caller that stops waiting for a worker kills it, because a late reply must
never be read as the reply to the next request.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.shared.errors import ScorerFailed
from rollmesh.shared.process_launch import bound_to_parent

_LINE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether the text equals an accepted answer, and the parsed text (empty if it cannot be parsed)."""

    equal: bool
    understood: str


class MathPool:
    """Compares through `rollmesh.services.reward.math_worker`."""

    def __init__(self, *, num_workers: int, compare_s_max: float, start_s_max: float, memory_bytes_max: int) -> None:
        self._slots = asyncio.Semaphore(num_workers)
        self._compare_s_max = compare_s_max
        self._start_s_max = start_s_max
        self._memory_bytes_max = memory_bytes_max
        self._idle: list[Process] = []
        self._closed = False

    async def compare(self, answers: Sequence[str], text: str) -> Comparison:
        """Compare a text with accepted answers. Raise ScorerFailed if the worker fails or exceeds `compare_s_max`."""
        request = {"answers": list(answers), "text": text, "limit_s": self._compare_s_max}
        async with self._slots:
            if self._closed:
                raise ScorerFailed("the math scorer is closed")
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                reply = await self._ask(worker, request)
            except BaseException:
                _kill(worker)
                raise
            self._idle.append(worker)
        if "error" in reply:
            raise ScorerFailed(f"comparison failed: {reply['error']}")
        return Comparison(bool(reply["equal"]), str(reply["understood"]))

    async def close(self) -> None:
        """End all idle workers. A running comparison ends by the cancellation of its caller or by its timeout."""
        self._closed = True
        workers, self._idle = self._idle, []
        for worker in workers:
            _kill(worker)
        await asyncio.gather(*(worker.wait() for worker in workers))

    async def _start(self) -> Process:
        command = [sys.executable, "-m", "rollmesh.services.reward.math_worker", str(self._memory_bytes_max)]
        worker = await asyncio.create_subprocess_exec(
            *bound_to_parent(command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=_LINE_BYTES_MAX,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            async with asyncio.timeout(self._start_s_max):
                await _reply_of(worker)
        except TimeoutError:
            _kill(worker)
            raise ScorerFailed(f"a math worker did not start within {self._start_s_max} s") from None
        except BaseException:
            _kill(worker)
            raise
        return worker

    async def _ask(self, worker: Process, request: dict[str, object]) -> dict[str, object]:
        assert worker.stdin is not None
        try:
            async with asyncio.timeout(self._compare_s_max):
                worker.stdin.write(json.dumps(request).encode() + b"\n")
                await worker.stdin.drain()
                return await _reply_of(worker)
        except TimeoutError:
            raise ScorerFailed(f"comparison took longer than {self._compare_s_max} s") from None
        except OSError as error:
            raise ScorerFailed(f"a math worker exited: {error}") from error


async def _reply_of(worker: Process) -> dict[str, object]:
    assert worker.stdout is not None
    line = await worker.stdout.readline()
    if not line:
        raise ScorerFailed("a math worker exited")
    reply: dict[str, object] = json.loads(line)
    return reply


def _kill(worker: Process) -> None:
    """Kill a worker without waiting, which is safe during a cancellation. asyncio reaps the process."""
    if worker.returncode is None:
        worker.kill()
