"""A pool of worker processes that compare an answer with a key by code whose time has no bound, such as sympy or a
regular expression. Workers start on demand and are replaced after they have exited.

The CPU time of a comparison is bounded, not its duration, so a loaded host changes no result. The key and the answer
are measured apart: a worker reports when it has read the key, so that a request that exceeds the bound, or that crashes
its worker, has a known cause.

Invariant: a worker in `_idle` has answered all its requests. A caller that stops waiting for a worker kills it, because
a late reply must never be read as the reply to the next request.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from typing import Any

from rollmesh.shared.errors import ScorerFailed
from rollmesh.shared.process.process_launch import bound_to_parent

_LINE_BYTES_MAX = 1 << 20
_ENDED_BY_REQUEST = frozenset(
    -number for number in (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)
)
"""Exit statuses of a worker that has exceeded its CPU time or memory, or has overflowed its stack."""


class WorkerPool:
    """Compares in processes that run a module with `worker_loop.serve`."""

    def __init__(
        self,
        module: str,
        what: str,
        *,
        num_workers: int,
        compare_s_max: float,
        start_s_max: float,
        memory_bytes_max: int,
    ) -> None:
        """`module` is the program of a worker. `what` names the kind of the workers in errors, such as "math"."""
        self._module = module
        self._what = what
        self._slots = asyncio.Semaphore(num_workers)
        self.compare_s_max = compare_s_max
        """Maximum CPU time of a comparison, in seconds."""
        self._start_s_max = start_s_max
        self._memory_bytes_max = memory_bytes_max
        self._idle: list[Process] = []
        self._closed = False

    async def ask(self, key: Mapping[str, Any], text: str) -> dict[str, Any] | None:
        """Return the reply of a worker on a text and a key, or None if the text needs more than `compare_s_max` of CPU
        or ends the worker.

        Raise ScorerFailed if no text can be compared with the key, or if a worker fails without a cause in the request.
        """
        async with self._slots:
            reply = await self._ask(key, text)
        if reply is not None and "error" in reply:
            raise ScorerFailed(f"comparison failed: {reply['error']}; correct the key of the task")
        return reply

    async def close(self) -> None:
        """End all idle workers. A running comparison ends by the cancellation of its caller or by its timeout."""
        self._closed = True
        workers, self._idle = self._idle, []
        for worker in workers:
            _kill(worker)
        await asyncio.gather(*(worker.wait() for worker in workers))

    async def _start(self) -> Process:
        command = [sys.executable, "-m", self._module, str(self._memory_bytes_max)]
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
                if await _reply_of(worker) is None:
                    raise ScorerFailed(
                        f"a {self._what} worker exited with status {await worker.wait()} while it started"
                    )
        except TimeoutError:
            _kill(worker)
            raise ScorerFailed(f"a {self._what} worker did not start within {self._start_s_max} s") from None
        except BaseException:
            _kill(worker)
            raise
        return worker

    async def _ask(self, key: Mapping[str, Any], text: str) -> dict[str, Any] | None:
        """Return the reply of a worker, or None if the text has ended the worker. Raise ScorerFailed if the key has."""
        if self._closed:
            raise ScorerFailed(f"the {self._what} scorer is closed")
        worker = self._idle.pop() if self._idle else await self._start()
        assert worker.stdin is not None
        try:
            request = {**key, "text": text, "cpu_s": self.compare_s_max}
            worker.stdin.write(json.dumps(request).encode() + b"\n")
            await worker.stdin.drain()
            begun = await _reply_of(worker)
            reply = await _reply_of(worker) if begun is not None else None
            if reply is None and await worker.wait() not in _ENDED_BY_REQUEST:
                raise ScorerFailed(f"a {self._what} worker exited with status {worker.returncode}")
        except OSError as error:
            _kill(worker)
            raise ScorerFailed(f"a {self._what} worker exited: {error}") from error
        except BaseException:
            _kill(worker)
            raise
        if begun is None:
            cause = f"needs more than {self.compare_s_max:g} s of CPU to compare (`compare_s_max`)"
            if worker.returncode != -signal.SIGPROF:
                cause = f"ends the process that reads it (status {worker.returncode})"
            raise ScorerFailed(
                f"an accepted answer of the key {cause}; write its value in a simpler form in the key of the task"
            )
        if reply is not None:
            self._idle.append(worker)
        return reply


async def _reply_of(worker: Process) -> dict[str, Any] | None:
    """Return the next line of a worker, or None if it has exited."""
    assert worker.stdout is not None
    line = await worker.stdout.readline()
    if not line:
        return None
    reply: dict[str, Any] = json.loads(line)
    return reply


def _kill(worker: Process) -> None:
    """Kill a worker without waiting, which is safe during a cancellation. asyncio reaps the process."""
    if worker.returncode is None:
        worker.kill()
