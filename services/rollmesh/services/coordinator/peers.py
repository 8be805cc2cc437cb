"""The coordinator's calls to other services, at the addresses with which they joined."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rollmesh.services.coordinator.core.decision_context import CancelEpisodes
from rollmesh.services.coordinator.core.fleet import NodeKind
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper
from rollmesh.services.coordinator.translate import to_wire
from rollmesh.shared.errors import NotReady, UnknownBlob
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import MeshChannel, open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.v1 import (
    coordinator_pb2,
    data_pb2,
    data_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

CHANNELS_MAX = 64
MANIFEST_BYTES_MAX = 64 * 1024 * 1024
HAS_MAX = 10_000
"""Number of digests per Has request, by its contract."""


class Outgoing:
    """Channels by address, and calls over them. Calls rotate over the nodes of a kind."""

    def __init__(self, keeper: FleetKeeper, *, access: Access, call_s: float) -> None:
        self._keeper = keeper
        self._access = access
        self._call_s = call_s
        self._channels: dict[str, MeshChannel] = {}
        self._turn = itertools.count()

    async def next_tasks(self, request: data_pb2.NextTasksRequest) -> data_pb2.NextTasksResponse:
        stub: data_pb2_grpc.DataServiceAsyncStub = data_pb2_grpc.DataServiceStub(
            await self._channel(NodeKind.DATA, request.run)
        )
        with typed_errors():
            return await stub.NextTasks(request, timeout=self._call_s)

    async def finalize_group(self, request: reward_pb2.FinalizeGroupRequest) -> reward_pb2.FinalizeGroupResponse:
        stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(
            await self._channel(NodeKind.REWARD, request.run)
        )
        with typed_errors():
            return await stub.FinalizeGroup(request, timeout=self._call_s)

    async def forget_run(self, run: str) -> None:
        """Remove what the data services and the depot store of a run. Raises NotReady without a depot."""
        with typed_errors():
            for address in self._keeper.addresses(NodeKind.DATA, run):
                data: data_pb2_grpc.DataServiceAsyncStub = data_pb2_grpc.DataServiceStub(await self._open(address))
                await data.ForgetRun(data_pb2.ForgetRunRequest(run=run), timeout=self._call_s)
            depot: weights_pb2_grpc.BlobServiceAsyncStub = weights_pb2_grpc.BlobServiceStub(
                await self._channel(NodeKind.DEPOT, run)
            )
            await depot.ReleaseRun(weights_pb2.ReleaseRunRequest(run=run), timeout=self._call_s)

    def cancel_episodes(self, run: str, command: CancelEpisodes) -> None:
        leases = [to_wire(run, lease_id) for lease_id in command.lease_ids]
        cancel = coordinator_pb2.CancelEpisodes(lease_ids=leases, reason=command.reason)
        self._keeper.send(command.node_id, coordinator_pb2.JoinResponse(cancel=cancel))

    async def missing_blobs(self, run: str, weights_digest: str) -> list[str]:
        """Return what the depot lacks of a version: its manifest, or chunks of it. Empty if it has all."""
        stub: weights_pb2_grpc.BlobServiceAsyncStub = weights_pb2_grpc.BlobServiceStub(
            await self._channel(NodeKind.DEPOT, run)
        )
        with typed_errors():
            answer = await stub.Has(weights_pb2.HasRequest(weights_digest=weights_digest), timeout=self._call_s)
            if answer.version_checked:
                return sorted(answer.missing)
            try:  # a depot of an earlier release
                manifest = await self._manifest(stub, weights_digest)
            except UnknownBlob:
                return [weights_digest]
            chunks = sorted({chunk.digest for file in manifest.files for chunk in file.chunks})
            return await self._missing(stub, chunks)

    async def _manifest(self, stub: weights_pb2_grpc.BlobServiceAsyncStub, digest: str) -> weights_pb2.WeightManifest:
        content = bytearray()
        with typed_errors():
            async for piece in stub.Fetch(weights_pb2.FetchRequest(digest=digest), timeout=self._call_s):
                content += piece.data
                if len(content) > MANIFEST_BYTES_MAX:
                    raise UnknownBlob(f"blob {digest[:12]} is over {MANIFEST_BYTES_MAX} bytes: not a manifest")
        return parse_manifest(bytes(content))

    async def _missing(self, stub: weights_pb2_grpc.BlobServiceAsyncStub, digests: Sequence[str]) -> list[str]:
        missing: list[str] = []
        for start in range(0, len(digests), HAS_MAX):
            batch = digests[start : start + HAS_MAX]
            answer = await stub.Has(weights_pb2.HasRequest(digests=batch), timeout=self._call_s)
            missing += answer.missing
        return missing

    async def close(self) -> None:
        while self._channels:
            await self._channels.popitem()[1].close()

    async def _channel(self, kind: NodeKind, run: str) -> MeshChannel:
        addresses = self._keeper.addresses(kind, run)
        if not addresses:
            raise NotReady(f"no {kind.name.lower()} node serves run {run}; start one", kind=kind.name, run=run)
        return await self._open(addresses[next(self._turn) % len(addresses)])

    async def _open(self, address: str) -> MeshChannel:
        if address not in self._channels:
            while len(self._channels) >= CHANNELS_MAX:
                await self._channels.pop(next(iter(self._channels))).close()
            self._channels[address] = open_channel(address, access=self._access)
        return self._channels[address]
