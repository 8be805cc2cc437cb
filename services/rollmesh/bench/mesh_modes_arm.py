"""Measure one mode of training in a separate process: the bare loop, the mesh in one process, or one process per service.

`python -m rollmesh.bench.mesh_modes_arm` reads a `Work` as JSON from stdin and writes a `Measured` as JSON. It is a
separate process, because interpreter settings, heaps and caches of one mode would affect the next. Between `warm` and `warm + num`
updates it only counts. The profile covers the next `num_profiled` updates, so that sampling does not affect the counts.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Protocol

import msgspec
import yaml

from rollmesh.bench.bare_loop import BareLoop
from rollmesh.bench.cpu_profile import tree_cpu_s
from rollmesh.bench.mesh_modes_profile import MODEL, profiled_by_process, profiled_here
from rollmesh.bench.warm_model import CONFIG
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.interpreter_tuning import tune_process
from rollmesh.mesh.running_mesh import RunningMesh
from rollmesh.mesh.supervisor import Supervisor
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.shared.config import config_from_dict

Mode = Literal["bare", "mesh", "processes"]
Metrics = Mapping[str, float | None]
POLL_S = 0.05
LIMIT_S = 900.0
LEARNING_RATE = 1e-6


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a measurement."""

    mode: Mode
    eta: int
    """Staleness bound of the mesh; the bare loop has none."""
    model: str
    warm: int
    """Number of uncounted updates at the start."""
    num: int
    """Number of counted updates."""
    num_profiled: int
    """Number of profiled updates after them."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The result, per update except for `hops`."""

    wall_s: float
    cpu_s: float
    """CPU seconds of all processes."""
    samples: float
    """Number of trained samples."""
    tokens: float
    """Number of sampled tokens that were trained."""
    success: float
    """Mean reward of the trained samples; equal work has equal rewards."""
    hops: dict[str, float]
    """Share of CPU by service in [0, 1]; model compute belongs to its service."""
    model_share: float | None
    """Share of the threads that generate and train; None if processes are not profiled."""


class MeshModesArm(Protocol):
    """A running training."""

    async def until(self, update: int) -> int:
        """Wait until the update is made and its weights are swapped or published, and return the newest update."""
        ...

    def metrics(self) -> Mapping[int, Metrics]:
        """Return the metrics of the trainer by update."""
        ...

    def profiled(self) -> AbstractContextManager[dict[str, float]]:
        """See `mesh_modes_profile`."""
        ...


async def measure(arm: MeshModesArm, work: Work) -> Measured:
    first = await arm.until(work.warm)
    begin_s, begin_cpu_s = time.perf_counter(), tree_cpu_s()
    last = await arm.until(first + work.num)
    wall_s, cpu_s = time.perf_counter() - begin_s, tree_cpu_s() - begin_cpu_s
    with arm.profiled() as spent:
        await arm.until(last + work.num_profiled)
    model_s = spent.pop(MODEL, None)
    total_s = sum(spent.values())
    made = [metrics for update, metrics in arm.metrics().items() if first < update <= last]
    num = last - first
    return Measured(
        wall_s=wall_s / num,
        cpu_s=cpu_s / num,
        samples=_mean(made, "samples/used"),
        tokens=_mean(made, "tokens/trained"),
        success=_mean(made, "reward/correct"),
        hops={part: seconds / total_s for part, seconds in spent.items()},
        model_share=None if model_s is None else model_s / total_s,
    )


def _mean(made: list[Metrics], name: str) -> float:
    return sum(metrics[name] or 0.0 for metrics in made) / len(made)


# The arms --------------------------------------------------------------------------------------------------------------


class BareArm:
    """The bare loop, which advances only while a caller waits for it."""

    def __init__(self, loop: BareLoop) -> None:
        self._loop = loop
        self._metrics: dict[int, Metrics] = {}

    async def until(self, update: int) -> int:
        while len(self._metrics) < update:
            result = await self._loop.update()
            self._metrics[result.update] = result.metrics
        return update

    def metrics(self) -> Mapping[int, Metrics]:
        return self._metrics

    def profiled(self) -> AbstractContextManager[dict[str, float]]:
        return profiled_here()


class MeshArm:
    """A mesh, which advances independently. Its updates are read from the file of the learner."""

    def __init__(self, mesh: RunningMesh, profiled: Callable[[], AbstractContextManager[dict[str, float]]]) -> None:
        self._file = mesh.layout.run_dir / "metrics.jsonl"
        self.profiled = profiled

    async def until(self, update: int) -> int:
        size = 0
        while True:
            if self._file.exists() and (now := self._file.stat().st_size) > size:
                size = now
                if (newest := max(self.metrics(), default=0)) >= update:
                    return newest
            await asyncio.sleep(POLL_S)

    def metrics(self) -> Mapping[int, Metrics]:
        return {update: line.metrics for update, line in read_metrics(self._file).items()}


@asynccontextmanager
async def open_arm(work: Work, folder: Path) -> AsyncIterator[MeshModesArm]:
    """Start training in `folder`."""
    config, model = run_config(work), Path(work.model)
    if work.mode == "bare":
        async with BareLoop(config, model, folder) as loop:
            tune_process()
            yield BareArm(loop)
    elif work.mode == "mesh":
        async with Mesh(config, run_dir=folder / "run", base_dir=folder) as mesh:
            yield MeshArm(mesh, profiled_here)
    else:
        async with Supervisor(config, run_dir=folder / "run", base_dir=folder) as supervisor:
            yield MeshArm(supervisor, lambda: profiled_by_process(supervisor))


def run_config(work: Work) -> MeshConfig:
    """Return the small demo without an end and without evaluations, checkpoints and filtered groups, which only the mesh has.

    Weights change in every update but the policy stays where it is: arms that learn differently would soon sample other lengths.
    """
    values = yaml.safe_load(CONFIG.read_text())
    del values["made_model"]
    values["model"] = work.model
    values["run"] |= {"max_staleness": work.eta, "updates_max": 0, "eval_every": 0}
    values["learner"] |= {"checkpoint_every": 10_000, "tensorboard": False}
    values["learner"]["optimizer"] = {"lr": LEARNING_RATE}
    values["reward"] = {"finalizer": {"name": "keep_all"}}
    return config_from_dict(MeshConfig, values)


async def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        async with asyncio.timeout(LIMIT_S), open_arm(work, Path(folder)) as arm:
            measured = await measure(arm, work)
    sys.stdout.buffer.write(msgspec.json.encode(measured) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
