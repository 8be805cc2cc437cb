"""A trainer without training, which shows that a mesh works and how long its batches take."""

from __future__ import annotations

import time

import numpy as np

from rollmesh.client import Client, Run
from rollmesh.v1 import events_pb2

WEIGHTS = {"a": np.ones(2, np.float32)}


def spec(run: str, **changes: float | str) -> events_pb2.RunSpec:
    """A small run with short leases."""
    values = {
        "run": run, "max_staleness": 0, "batch_groups": 2, "group_size": 2, "publish_every": 1, "tries_max": 20,
        "episode_lease_s": 4.0, "batch_lease_s": 30.0, "group_s_max": 60.0, "eval_s_max": 30.0, "updates_max": 3,
        "success_reward": "correct",
    }  # fmt: skip
    return events_pb2.RunSpec(**(values | changes))  # type: ignore[arg-type]


async def whole_run(client: Client, run: str, **changes: float | str) -> list[float]:
    """Drive a run from its creation to its end. Return the seconds from each publication to the next batch."""
    return await drive(await client.create_run(spec(run, **changes)))


async def drive(made: Run) -> list[float]:
    """Drive a run to its end. Return the seconds from each publication to the next batch."""
    took: list[float] = []
    async with await made.attach(holder="garbage") as trainer:
        await trainer.publish(WEIGHTS)
        published_s = time.monotonic()
        async for batch in trainer.batches():
            took.append(time.monotonic() - published_s)
            await trainer.commit(batch)
            await trainer.report_checkpoint()
            await trainer.publish(WEIGHTS)
            published_s = time.monotonic()
    return took
