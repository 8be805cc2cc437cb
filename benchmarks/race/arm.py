"""Run one arm of the race in a separate process: the bare loop, the mesh in one process, or one process per service.

`python -m benchmarks.race.arm` reads a `RaceWork` as JSON from stdin and writes a `RaceRun` as JSON. It is a separate
process, because interpreter settings, heaps and caches of one arm would affect the next. The profile covers the
`num_profiled` updates after the last counted one, so that sampling does not affect the counts.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from benchmarks.race.bare_loop import BareLoop
from benchmarks.race.profile import MODEL, profiled_by_process, profiled_here
from benchmarks.race.work import RaceClock, RaceMark, RaceMode, RaceRun, RaceWork, UpdateSeen, race_config
from rollmesh.mesh import Mesh
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.running_mesh import RunningMesh
from rollmesh.mesh.supervisor import Supervisor, hosts_in_one_process
from rollmesh.services.learner.metrics_log import MetricsLine, read_metrics
from rollmesh.shared.process.interpreter_tuning import tune_process
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import run_pb2, run_pb2_grpc

POLL_S = 0.05
CALL_S_MAX = 5.0
PROFILE_S_MAX = 60.0


class RaceArm(Protocol):
    """A running training."""

    async def until(self, update: int) -> RaceMark:
        """Wait until the update is made, and return the mark of the newest one."""
        ...

    def updates(self) -> list[UpdateSeen]:
        """Return the metrics of all updates."""
        ...

    def profiled(self) -> AbstractContextManager[dict[str, float]]:
        """See `race_profile`."""
        ...

    def snapshots(self) -> None:
        """Put the snapshots where the evaluator reads them, if that is not done yet."""
        ...


async def run_arm(arm: RaceArm, work: RaceWork) -> RaceRun:
    marks: list[RaceMark] = []
    while not marks or (marks[-1].update < work.updates and marks[-1].wall_s < work.limit_s):
        marks.append(await arm.until(marks[-1].update + 1 if marks else 1))
    parts, model_share = await _parts(arm, marks[-1].update + work.num_profiled)
    arm.snapshots()
    return RaceRun(marks=tuple(marks), updates=tuple(arm.updates()), parts=parts, model_share=model_share)


async def _parts(arm: RaceArm, last: int) -> tuple[dict[str, float], float | None]:
    """Return the shares of CPU by part and of the model until update `last`, or nothing if they take too long."""
    try:
        async with asyncio.timeout(PROFILE_S_MAX):
            with arm.profiled() as spent:
                await arm.until(last)
    except TimeoutError:
        return {}, None
    model_s = spent.pop(MODEL, None)
    total_s = sum(spent.values())
    shares = {part: seconds / total_s for part, seconds in spent.items()} if total_s else {}
    return shares, model_s / total_s if model_s is not None and total_s else None


# The arms -------------------------------------------------------------------------------------------------------------


class BareArm:
    """The bare loop, which advances only while a caller waits for it."""

    def __init__(self, loop: BareLoop, work: RaceWork, clock: RaceClock) -> None:
        self._loop = loop
        self._work = work
        self._clock = clock
        self._updates: list[UpdateSeen] = []

    async def until(self, update: int) -> RaceMark:
        while len(self._updates) < update:
            result = await self._loop.update()
            self._updates.append(_seen(result.update, dict(result.metrics), {}))
        mark = self._clock.mark(update)
        if update % self._work.snapshot_every == 0:
            self._clock.pause()
            folder = Path(self._work.folder) / "snapshots" / str(update)
            shutil.copytree(self._work.model, folder)
            self._loop.trainer.export_weights(folder)
            self._clock.go()
        return mark

    def updates(self) -> list[UpdateSeen]:
        return self._updates

    def profiled(self) -> AbstractContextManager[dict[str, float]]:
        return profiled_here()

    def snapshots(self) -> None:
        pass


class MeshArm:
    """A mesh, which advances independently. Its updates are read from the file of the learner, its snapshots are its
    checkpoints."""

    def __init__(
        self,
        mesh: RunningMesh,
        work: RaceWork,
        clock: RaceClock,
        stub: Any,
        profiled: Callable[[], AbstractContextManager[dict[str, float]]],
    ) -> None:
        self._mesh = mesh
        self._work = work
        self._clock = clock
        self._stub = stub
        self._file = mesh.layout.run_dir / "metrics.jsonl"
        self._size = 0
        self.profiled = profiled

    async def until(self, update: int) -> RaceMark:
        while True:
            if self._file.exists() and (size := self._file.stat().st_size) > self._size:
                self._size = size
                newest = max(self._lines(), default=0)
                if newest >= update:
                    return self._clock.mark(newest, await self._dropped())
            await asyncio.sleep(POLL_S)

    async def _dropped(self) -> int:
        with typed_errors():
            reply = await self._stub.GetRun(run_pb2.GetRunRequest(run=self._mesh.layout.run), timeout=CALL_S_MAX)
        counts = reply.state.samples
        return int(counts.filtered + counts.stale + counts.failed + counts.cancelled)

    def updates(self) -> list[UpdateSeen]:
        return [_seen(update, line.metrics, line.seconds) for update, line in self._lines().items()]

    def snapshots(self) -> None:
        for found in self._mesh.layout.run_dir.rglob("checkpoints/update-*"):
            number = int(found.name.removeprefix("update-").partition(".")[0])
            shutil.copytree(found, Path(self._work.folder) / "snapshots" / str(number))

    def _lines(self) -> dict[int, MetricsLine]:
        return read_metrics(self._file)


def _seen(update: int, metrics: dict[str, float | None], seconds: dict[str, float]) -> UpdateSeen:
    ages = {
        name.split("/")[1]: value or 0.0
        for name, value in metrics.items()
        if name.startswith("lag/") and name.endswith("/tokens")
    }
    return UpdateSeen(
        update=update,
        samples=metrics["samples/used"] or 0.0,
        tokens=metrics["tokens/trained"] or 0.0,
        success=metrics["reward/correct"] or 0.0,
        staleness=ages,
        generation_s=seconds.get("wait", 0.0),
        training_s=seconds.get("train", 0.0),
    )


@asynccontextmanager
async def open_arm(work: RaceWork) -> AsyncIterator[RaceArm]:
    """Start training."""
    clock, config, folder = RaceClock(), race_config(work), Path(work.folder)
    if work.mode == "bare":
        async with BareLoop(config, Path(work.model), folder) as loop:
            tune_process()
            yield BareArm(loop, work, clock)
        return
    async with (
        _mesh(config, work.mode, folder) as mesh,
        open_channel(mesh.layout.gateway, access=mesh.layout.access) as channel,
    ):
        profiled = (lambda: profiled_by_process(mesh)) if isinstance(mesh, Supervisor) else profiled_here
        yield MeshArm(mesh, work, clock, run_pb2_grpc.RunServiceStub(channel), profiled)


def _mesh(config: MeshConfig, mode: RaceMode, folder: Path) -> Mesh | Supervisor:
    if mode == "mesh":
        return Mesh(config, run_dir=folder / "run", base_dir=folder)
    hosts = hosts_in_one_process(config, folder) if mode == "learner apart" else None
    return Supervisor(config, run_dir=folder / "run", base_dir=folder, hosts=hosts)


async def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=RaceWork)
    async with open_arm(work) as arm:
        result = await run_arm(arm, work)
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
