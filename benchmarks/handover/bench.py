"""Samples per second and CPU per sample from worker to trainer, against the same transfer with Ray.

Ours: lease -> payload to a file of the run -> report -> batch lease -> read -> commit, with checkpoint and weights as
in any run. Three processes (services; worker; learner) and nats-server; the worker generates nothing, the trainer
computes nothing. Ray: worker actor -> object store -> controller actor -> driver (`ray_handover`), with the processes
that Ray starts. Both move the same arrays in lists of the same length.

How to read it: `ours is` above 1 means that ours is better. The guarantees differ. Ours writes every payload and every
decision to a file, checks and fences each step, and survives the kill of any process. Ray keeps references and objects
in memory and loses them with their owner, but reads them without a copy. The baseline needs a Python with Ray: `pip
install ray` in a separate environment, and set ROLLMESH_RAY_PYTHON to its interpreter. Without it only our rows appear.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cpu_profile import tree_cpu_s
from benchmarks.progress import until_update
from benchmarks.report import BenchTarget, Report, spread
from rollmesh.mesh import MeshConfig
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.shared.config.loader import config_from_dict, to_yaml
from rollmesh.shared.config.user_code import explain

BATCH = 512
SIZES = {4096: 16, 65536: 8, 262144: 4}
"""Number of batches of a lap, by bytes per sample."""
WARM = 2
LIMIT_S = 240.0
RAY_PYTHON = "ROLLMESH_RAY_PYTHON"
SERVICES = ("nats,coordinator,depot,reward,data,gateway", "learner")


@dataclass(frozen=True, slots=True)
class Rate:
    samples_per_s: float
    cpu_ms: float


def run(quick: bool) -> Report:
    laps = 1 if quick else 3
    report = Report("handover", f"batches of {BATCH} samples; {laps} laps in turns, each in new processes")
    ray_python = os.environ.get(RAY_PYTHON, "")
    num_finished = 0
    for num_bytes, num_batches in SIZES.items():
        ours: list[Rate] = []
        rays: list[Rate] = []
        try:
            for _ in range(laps):
                rate = _ours(num_bytes, num_batches)
                if ray_python:
                    rays.append(_ray(ray_python, num_bytes, num_batches))
                ours.append(rate)
        except (TimeoutError, subprocess.TimeoutExpired, subprocess.CalledProcessError) as err:
            report.notes.append(f"{num_bytes // 1024} KB: lap {len(ours) + 1} of {laps} did not finish: {explain(err)}")
        num_finished += len(ours)
        if not ours:
            continue
        del rays[len(ours) :]
        report.rows.append(_row(num_bytes, ours, rays))
        if rays:
            ratio = median(o.samples_per_s / r.samples_per_s for o, r in zip(ours, rays, strict=True))
            what = f"samples/s over Ray's, {num_bytes // 1024} KB"
            report.targets.append(BenchTarget(what, ratio, 1.0, at_most=False))
    report.targets.append(BenchTarget("laps that finished", num_finished, laps * len(SIZES), at_most=False))
    if not ray_python:
        report.notes.append(f"no baseline: set {RAY_PYTHON} to a Python that has Ray")
    return report


def _row(num_bytes: int, ours: list[Rate], rays: list[Rate]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "sample": f"{num_bytes // 1024} KB",
        "samples/s": spread([r.samples_per_s for r in ours]),
        "CPU ms/sample": spread([r.cpu_ms for r in ours], 2),
    }
    if rays:
        pairs = list(zip(ours, rays, strict=True))
        row |= {
            "Ray samples/s": spread([r.samples_per_s for r in rays]),
            "Ray CPU ms/sample": spread([r.cpu_ms for r in rays], 2),
            "ours is, wall": f"{median(o.samples_per_s / r.samples_per_s for o, r in pairs):.2f}",
            "ours is, CPU": f"{median(r.cpu_ms / o.cpu_ms for o, r in pairs):.2f}",
        }
    return row


def _ray(python: str, num_bytes: int, num_batches: int) -> Rate:
    script = Path(__file__).with_name("ray.py")
    command = [python, "-I", str(script), *map(str, (num_bytes, BATCH, num_batches, WARM))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return Rate(**json.loads(done.stdout.splitlines()[-1]))


def _ours(num_bytes: int, num_batches: int) -> Rate:
    with TemporaryDirectory(prefix="rollmesh-bench-") as name:
        folder = Path(name)
        config_file = folder / "run.yaml"
        config = _config()
        config_file.write_text(to_yaml(config))
        layout = open_layout(config, run_dir=folder / "run", base_dir=folder)
        return asyncio.run(_measure(layout, config_file, num_bytes, num_batches))


async def _measure(layout: RunLayout, config_file: Path, num_bytes: int, num_batches: int) -> Rate:
    host = [
        sys.executable,
        "-m",
        "rollmesh.mesh",
        "--run-dir",
        layout.run_dir,
        "--config",
        config_file,
        "--services",
    ]
    worker = [sys.executable, "-m", "benchmarks.handover.worker", layout.run_dir, config_file, num_bytes]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [_start([*host, services], layout) for services in SERVICES]
        await until_update(layout, 0, limit_s=LIMIT_S)
        processes.append(_start(worker, layout))
        await until_update(layout, WARM, limit_s=LIMIT_S)
        begin_s, begin_cpu_s = time.perf_counter(), tree_cpu_s()
        first = await until_update(layout, WARM, limit_s=LIMIT_S)
        last = await until_update(layout, first + num_batches, limit_s=LIMIT_S)
        wall_s, cpu_s = time.perf_counter() - begin_s, tree_cpu_s() - begin_cpu_s
    finally:
        _end(processes)
    num = (last - first) * BATCH
    return Rate(samples_per_s=num / wall_s, cpu_ms=1e3 * cpu_s / num)


def _start(command: list[Any], layout: RunLayout) -> subprocess.Popen[bytes]:
    with (layout.run_dir / "bench.log").open("ab") as log:
        return subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):  # the services last, because they stop nats-server cleanly
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _config() -> MeshConfig:
    return config_from_dict(
        MeshConfig,
        {
            "run": {
                "name": "bench", "max_staleness": 2, "batch_groups": 64, "group_size": 8,
                "updates_max": 0, "eval_every": 0,
            },
            "counts": {"sandbox": 0},
            "reward": {"finalizers": ["keep_all"]},
            "coordinator": {"streams": {"samples_bytes_max": 2 << 30}},
            "learner": {
                "engine": "fake", "tensorboard": False,
            },
        },
    )  # fmt: skip
