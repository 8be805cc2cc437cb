"""Send malformed requests to a mesh with a live run and a leased batch, and show that the mesh works afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollmesh.client import Client
from rollmesh.shared.membership.membership import Membership, PassiveHandler
from rollmesh.shared.rpc.access import Access
from rollmesh.v1 import coordinator_pb2, events_pb2, types_pb2

from .requests import Sizes
from .trainer import WEIGHTS, spec, whole_run
from .walk import Result, servers_of, walk

WORKER = "garbage-worker"
UPDATES = 3


async def exercise(coordinator: str, gateway: str, access: Access, sizes: Sizes, *, every: int = 1) -> Result:
    """Walk over every server of the mesh, then drive a whole run. `every` is as for `walk`."""
    hello = coordinator_pb2.NodeHello(node_id=WORKER, kind=coordinator_pb2.NODE_KIND_ROLLOUT, capacity=1)
    async with (
        Client(gateway, token=access.token) as client,
        Membership(coordinator, access=access, handler=PassiveHandler(hello)) as member,
    ):
        await member.wait_joined()
        async with _leased(client, "another") as theirs:
            await client.run("another").stop()  # the mesh serves one live run at a time
        async with _leased(client, "target") as mine:
            servers = await servers_of(coordinator, access)
            values = _plausible(*mine)
            foreign = dict(zip(_OWNED, theirs, strict=True)) | {
                "run": "another",
                "lease_ids": theirs[1],
                "node_id": next(name for name in servers if name not in (WORKER, "coordinator")),
            }
            result = await walk(servers, access, values, foreign, sizes, every=every)
        assert len(await whole_run(client, "afterwards", updates_max=UPDATES)) == UPDATES
    return result


_OWNED = ("trainer_epoch", "lease_id", "sample_id")
"""Fields whose values belong to one run."""


@asynccontextmanager
async def _leased(client: Client, run: str) -> AsyncIterator[tuple[int, str, str]]:
    """A new run with a batch lease: trainer epoch, lease and the first sample."""
    made = await client.create_run(spec(run, updates_max=0))
    async with await made.attach() as trainer:
        await trainer.publish(WEIGHTS)
        batch = await trainer.batch()
        assert batch is not None
        yield trainer.attached.trainer_epoch, batch.lease_id, batch.samples[0].sample_id


def _plausible(epoch: int, lease_id: str, sample_id: str) -> dict[str, Any]:
    """Values by the name of a field that bring a request past the first checks."""
    run_spec: events_pb2.RunSpec = spec("target", updates_max=0)
    return {
        "run": "target",
        "policy": "main",
        "learner": "main",
        "trainer_epoch": epoch,
        "lease_id": lease_id,
        "lease_ids": lease_id,
        "sample_id": sample_id,
        "update": 1,
        "node_id": WORKER,
        "num_max": 1,
        "spec": run_spec,
        "digest": "ab" * 32,
        "digests": "ab" * 32,
        "weights_digest": "ab" * 32,
        "owner": "garbage",
        "session_id": "garbage",
        "request_id": "garbage",
        "profile": "python",
        "purpose": types_pb2.PURPOSE_TRAIN,
        "kind": coordinator_pb2.NODE_KIND_ROLLOUT,
        "num": 1,
        "amount": 1,
        "attempt": 1,
        "outcome": 1,
        "code": "1",
    }


def report(result: Result) -> str:
    """The counts, and a line for each finding."""
    lines = [f"{f.server} {f.method} <{f.case}>: {f.answer}" for f in result.findings]
    return "\n".join([f"{result.num_calls} calls, {dict(result.codes)}", *lines])
