"""What a player can reach of a mesh: its RPCs as bare stubs, its sample stream, and its depot."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.membership.membership import Membership, MembershipConfig, PassiveHandler
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2, types_pb2, weights_pb2, weights_pb2_grpc

JOIN = MembershipConfig(backoff_s=0.02, backoff_s_max=0.2, leave_s=0.5)
PUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Ends:
    """Stubs of one mesh."""

    run: Any
    """RunService of the gateway."""
    coordinator: Any
    """CoordinatorService."""
    coordinator_address: str
    bus: Bus
    access: Access
    bus_address: str = ""
    """host:port of nats-server in a mesh of processes."""

    @asynccontextmanager
    async def worker(self, run: str) -> AsyncIterator[str]:
        """Join as a rollout worker of `run`, and yield the node id."""
        hello = coordinator_pb2.NodeHello(
            node_id=f"worker-{run}", kind=coordinator_pb2.NODE_KIND_ROLLOUT, capacity=64, runs=[run]
        )
        node = Membership(self.coordinator_address, access=self.access, handler=PassiveHandler(hello), config=JOIN)
        async with node:
            await node.wait_joined()
            yield hello.node_id

    async def store(self, episode: types_pb2.Episode, key: types_pb2.EpisodeKey) -> types_pb2.PayloadRef:
        """Write the payload of the attempt `key` to the sample stream of its run."""
        payload = episode.SerializeToString()
        stream = await self.bus.open(run_streams(key.run).samples.name)
        sequence = await stream.append(payload, msg_id=f"{key.episode}.{key.attempt}")
        return types_pb2.PayloadRef(sequence=sequence, size_bytes=len(payload))

    async def upload(self, depot: str, content: bytes, owner: str) -> str:
        """Upload a version of one chunk. Return its weights digest."""
        chunk = hashlib.sha256(content).hexdigest()
        piece = weights_pb2.WeightChunk(digest=chunk, size_bytes=len(content))
        file = weights_pb2.WeightFile(name="model.safetensors", size_bytes=len(content), chunks=[piece])
        manifest = weights_pb2.WeightManifest(
            kind=weights_pb2.WeightManifest.KIND_FULL, files=[file], dtype="float32"
        ).SerializeToString()
        async with open_channel(depot, access=self.access) as channel:
            stub: Any = weights_pb2_grpc.BlobServiceStub(channel)
            for data in (content, manifest):
                digest = hashlib.sha256(data).hexdigest()
                request = weights_pb2.PutRequest(digest=digest, size_bytes=len(data), owner=owner, data=data)
                await stub.Put(_stream(request), timeout=PUT_S, wait_for_ready=True)
        return hashlib.sha256(manifest).hexdigest()


async def _stream(message: weights_pb2.PutRequest) -> AsyncIterator[weights_pb2.PutRequest]:
    yield message
