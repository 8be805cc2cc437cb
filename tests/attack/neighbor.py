"""The neighbor: a session of another tenant on the same node, which holds a secret and processes and works
continuously.

Its calls are timed one after another, in two kinds: while an attack runs, and quiet ones in between. Both come from the
same run, so that the speed of the machine cancels out.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.shared.errors import MeshError, SandboxFailed

_PAUSE_S = 0.004
"""Seconds between two timed calls, because a model calls again only after it has read the result."""
CALL_S = 20.0
"""Timeout of a call, long enough that a busy host alone loses no neighbor."""
_STATE = """
import os, signal, time
open("secret", "w").write({secret!r})
os.chmod("secret", 0o666)
os.chmod("/session", 0o777)
signals = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGIO):
    signal.signal(number, lambda number, frame: signals.append(number))
child = os.fork()
if child == 0:
    for number in range(1, 32):
        if number not in (9, 19):
            signal.signal(number, signal.SIG_DFL)
    time.sleep(3600)
    os._exit(0)

def state():
    return str([open("secret").read(), sorted(os.listdir("/session")), os.waitpid(child, os.WNOHANG), signals,
                os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, child), os.uname().nodename])

def tick():
    return "tock"
"""


@dataclass(slots=True)
class Latencies:
    """Durations of the neighbor's calls, in seconds."""

    quiet_s: list[float] = field(default_factory=list)
    attacked_s: list[float] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    """Median during one attack, by its name, if it ran long enough for five calls."""


class Neighbor:
    """The session "neighbor" of an engine."""

    def __init__(self, engine: JailEngine) -> None:
        self._engine = engine
        self.secret = f"neighbor-{secrets.token_hex(16)}"
        self.latencies = Latencies()
        self.num_lost_quiet = 0
        """Number of neighbors lost while no attack ran, which the host caused."""

    async def open(self) -> None:
        await self._engine.open("neighbor", "python", self._engine.limits("python"))
        code = _STATE.format(secret=self.secret)
        result = await self._engine.run("neighbor", Program(code=code), CALL_S)
        assert result.error_message == "", result.traceback

    async def replace(self) -> None:
        """Open a new session after an attack ended the first one."""
        await self._engine.end("neighbor")
        await self.open()

    async def state(self) -> str:
        """Return all state of the neighbor that an attack could change."""
        return (await self._engine.call("neighbor", "state", [], CALL_S)).result

    async def quiet(self, num_calls: int) -> None:
        """Time calls while nothing else runs."""
        for _ in range(num_calls):
            try:
                self.latencies.quiet_s.append(await self._tick())
            except MeshError:  # an overloaded host, because no attack runs; the next attack needs a new neighbor
                self.num_lost_quiet += 1
                await self.replace()
            await asyncio.sleep(_PAUSE_S)

    @contextlib.asynccontextmanager
    async def timed(self, name: str) -> AsyncIterator[None]:
        """Time calls while the block runs."""
        samples: list[float] = []
        sampling = asyncio.create_task(self._sample(samples))
        try:
            yield
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError, MeshError):
                await sampling  # the observation afterwards detects a lost neighbor
            self.latencies.attacked_s += samples
            if len(samples) >= 5:
                self.latencies.worst[name] = statistics.median(samples)

    async def _sample(self, samples: list[float]) -> None:
        """Finish each call, because a cancelled call would end the session."""
        while True:
            await asyncio.sleep(_PAUSE_S)
            call = asyncio.create_task(self._tick())
            try:
                samples.append(await asyncio.shield(call))
            except asyncio.CancelledError:
                samples.append(await call)
                raise

    async def _tick(self) -> float:
        began_s = time.perf_counter()
        result = await self._engine.call("neighbor", "tick", [], CALL_S)
        if result.result != "tock":
            raise SandboxFailed(f"the neighbor answered {result}")
        return time.perf_counter() - began_s


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile of a share."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
