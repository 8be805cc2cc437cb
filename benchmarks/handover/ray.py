"""The transfer of samples with Ray: worker actor -> object store -> controller actor -> trainer (the driver).

It runs in a Python with Ray and without rollmesh: `python ray_handover.py SAMPLE_BYTES BATCH NUM_BATCHES WARM_BATCHES`.
It prints one line of JSON. The controller grants leases under an admission bound, keeps references and metadata, and
returns batches, as the coordinator does. Nothing is durable or checked, and no call has a deadline. Leases, reports and
batches are lists of the same length as ours.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

LEASES, LIVE_BATCHES = 64, 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Finished = tuple[int, list[Any], dict[str, Any]]
"""Sample id, its reference (in a list, so that Ray does not resolve it), metadata."""


class Controller:
    """Leases, references and metadata of the live samples."""

    def __init__(self, batch: int) -> None:
        self.batch, self.next_id, self.live = batch, 0, 0
        self.ready: list[Finished] = []
        self.changed = asyncio.Condition()

    async def acquire(self, num: int) -> list[int]:
        async with self.changed:
            await self.changed.wait_for(lambda: self.live + num <= LIVE_BATCHES * self.batch)
            first, self.next_id = self.next_id, self.next_id + num
            self.live += num
            return list(range(first, first + num))

    async def report(self, finished: list[Finished]) -> None:
        async with self.changed:
            self.ready += finished
            self.changed.notify_all()

    async def lease_batch(self) -> list[Finished]:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.ready) >= self.batch)
            leased, self.ready = self.ready[: self.batch], self.ready[self.batch :]
            return leased

    async def commit(self, num: int) -> None:
        async with self.changed:
            self.live -= num
            self.changed.notify_all()


class Worker:
    """Creates samples without generating: the arrays of the first one are stored repeatedly."""

    def run(self, controller: Any, num_bytes: int) -> None:
        tokens = max(1, num_bytes // 9)
        rng = np.random.default_rng(0)
        sample = {
            "token_ids": rng.integers(0, 1000, tokens, dtype=np.int32),
            "logprobs": rng.standard_normal(tokens).astype(np.float32),
            "loss_mask": np.ones(tokens, dtype=np.uint8),
        }
        while True:
            ids = ray.get(controller.acquire.remote(LEASES))
            finished = [(i, [ray.put(sample)], {"reward": 1.0, "step": 0, "num_tokens": tokens}) for i in ids]
            ray.get(controller.report.remote(finished))


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, including exited children."""
    parents: dict[str, str] = {}
    spent: dict[str, float] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[path.name], spent[path.name] = fields[1], sum(int(f) for f in fields[11:15]) / TICKS_PER_S
    me, total = str(os.getpid()), 0.0
    for pid in parents:
        above = pid
        while above not in ("0", "1", me):
            above = parents.get(above, "0")
        total += spent[pid] if above == me else 0.0
    return total


def main() -> None:
    num_bytes, batch, num_batches, warm = map(int, sys.argv[1:5])
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False, configure_logging=False
    )
    controller = ray.remote(Controller).options(num_cpus=0).remote(batch)
    worker = ray.remote(Worker).options(num_cpus=0).remote()
    worker.run.remote(controller, num_bytes)
    for index in range(warm + num_batches):
        if index == warm:
            begin_s, begin_cpu_s = time.perf_counter(), tree_cpu_s()
        leased = ray.get(controller.lease_batch.remote())
        samples = ray.get([refs[0] for _, refs, _ in leased])
        assert all(sample["loss_mask"].all() for sample in samples)
        del samples
        ray.get(controller.commit.remote(len(leased)))
    num = num_batches * batch
    wall_s, cpu_s = time.perf_counter() - begin_s, tree_cpu_s() - begin_cpu_s
    print(json.dumps({"samples_per_s": num / wall_s, "cpu_ms": 1e3 * cpu_s / num}), flush=True)
    ray.shutdown()


main()
