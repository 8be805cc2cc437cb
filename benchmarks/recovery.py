"""How long training pauses after the kill -9 of each service.

A run as processes under the supervisor: real services, nats-server, jailed tool sessions of the fake sandbox; engine
and trainer are fakes, so that updates follow each other quickly and a pause is that of the mesh. Each process is killed
in turn. The result is the time from the kill to the second update committed after it (the first may have been in
flight). The baseline, in the same run and in turns, is the same wait without a kill.

How to read it: `pause` is the median wait minus the baseline's. It includes the back-off of the supervisor, the start
of an interpreter (most of it on a slow machine), recovery, joining, weights, and the expiry of leases:
`episode_lease_s` is 4 s here, the batch lease 6 s.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.progress import until_update
from benchmarks.report import Report, spread
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import MeshConfig
from rollmesh.mesh.supervisor import Supervisor
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.trainer.model_files import save_tokenizer

BASELINE = "no process"
SERVICES = (
    "learner", "rollout-0", "inference-0", "sandbox-0", "reward", "data", "depot", "gateway", "coordinator", "nats",
)  # fmt: skip
WARM = 5
NEXT = 2
"""Number of updates to wait for: the first one may have been in flight."""
LIMIT_S = 120.0


def run(quick: bool) -> Report:
    kills = 1 if quick else 3
    report = Report(
        "recovery", f"{kills} kills -9 of each process, {len(SERVICES)} processes, batches of 4 x 8 episodes"
    )
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        waits = asyncio.run(_measure(Path(folder), kills))
    usual_s = median(waits[BASELINE])
    for service, seconds in waits.items():
        pause_s = 0.0 if service == BASELINE else median(seconds) - usual_s
        report.rows.append({"killed": service, f"update {NEXT} after, s": spread(seconds, 2), "pause, s": pause_s})
    return report


async def _measure(folder: Path, kills: int) -> dict[str, list[float]]:
    model = folder / "model"
    model.mkdir()
    save_tokenizer(build_tokenizer(), model)
    waits: dict[str, list[float]] = {service: [] for service in (BASELINE, *SERVICES)}
    async with Supervisor(_config(model), run_dir=folder / "run", base_dir=folder) as mesh:
        await until_update(mesh.layout, WARM, limit_s=LIMIT_S)
        for _ in range(kills):
            for service in SERVICES:
                for killed in (BASELINE, service):
                    waits[killed].append(await _wait_after(mesh, killed))
    return waits


async def _wait_after(mesh: Supervisor, service: str) -> float:
    """Return the seconds from now, or from the kill of `service`, until `NEXT` more updates are committed."""
    # A learner that rolls back repeats updates, so count from the newest committed update.
    update = await until_update(mesh.layout, 0, limit_s=LIMIT_S)
    begin_s = time.perf_counter()
    if service != BASELINE:
        mesh.kill(service)
    await until_update(mesh.layout, update + NEXT, limit_s=LIMIT_S)
    return time.perf_counter() - begin_s


def _config(model: Path) -> MeshConfig:
    return config_from_dict(
        MeshConfig,
        {
            "run": {
                "name": "bench", "batch_groups": 4, "group_size": 8, "updates_max": 0, "eval_every": 0, "tries_max": 50,
                "episode_lease_s": 4.0, "batch_lease_s": 6.0,
            },
            "processes": {"restarts_max": 1000},
            "coordinator": {"fleet": {"heartbeat_s": 0.5, "suspect_after_s": 2.0, "dead_after_s": 4.0}},
            "inference": {
                "engine": {"name": "fake", "options": {"vocab_size": 112}},
            },
            "data": {"source": "calc"},
            "rollout": {
                "agent": "benchmarks.turns:Calling", "model_dir": str(model), "sampling": {"max_tokens": 20},
            },
            "sandbox": {"engine": "fake"},
            "reward": {"finalizers": ["keep_all"]},
            "learner": {
                "engine": "fake", "tensorboard": False,
                "checkpoint_every": 1,
            },
        },
    )  # fmt: skip
