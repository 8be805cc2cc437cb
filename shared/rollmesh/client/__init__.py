"""A thin async client for trainers in Python: no torch, no numpy, no NATS.

    async with Client("127.0.0.1:7000", token=token) as mesh:
        run = await mesh.create_run(spec)                                  # or mesh.run("r1")
        async with await run.attach(last_update=12, digest=digest) as trainer:
            await trainer.publish(weights)                                 # always after attaching
            async for batch in trainer.batches(on_wait=print):             # leases, fetches, renews in the background
                reasons = train(batch)                                     # sample id -> reason for dropping it
                committed = await trainer.commit(batch, dropped=reasons)
                save(weights, update=batch.update, digest=committed.digest, head=committed.head)
                await trainer.report_checkpoint()
                await trainer.publish(weights)

Every failed call raises a `rollmesh.shared.errors.MeshError`: `Fenced`, `LeaseExpired`, `NotPublished`, ...
docs/trainers.md gives the remedy for each.
"""

from rollmesh.client.batch import Batch, BatchLease, BatchSample
from rollmesh.client.client import Client, Run, RunAddress
from rollmesh.client.episode import OpenEpisode
from rollmesh.client.tensors import Array, Tensor
from rollmesh.client.trainer import Trainer

__all__ = [
    "Array",
    "Batch",
    "BatchLease",
    "BatchSample",
    "Client",
    "OpenEpisode",
    "Run",
    "RunAddress",
    "Tensor",
    "Trainer",
]
