"""The coordinator's calls to other services, at the addresses with which they joined."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Sequence

from rollmesh.services.coordinator.core.decision_context import CancelEpisodes
from rollmesh.services.coordinator.core.fleet import NodeKind
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper
from rollmesh.services.coordinator.translate import to_wire
from rollmesh.shared.domain.protocol import PROTOCOL
from rollmesh.shared.errors import HashMismatch, MeshError, NotReady, UnknownBlob
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import MeshChannel, connected_address, open_channel
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

_log = logging.getLogger(__name__)
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
        """Raise `ConnectionLost` if the node may have exited because of this group, in contrast to a node that is
        away."""
        address = self._addresses(NodeKind.REWARD, request.run)[0]
        channel = await self._open(address)
        stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(channel)
        with typed_errors(await connected_address(channel, address)):
            return await stub.FinalizeGroup(request, timeout=self._call_s)

    async def reward_names(self, run: str) -> list[str]:
        """Return the names of the run's scorers. Raises NotReady if no reward node has joined."""
        return [scorer.name for scorer in await self._scorers(run)]

    async def environment_rewards(self, run: str) -> list[str]:
        """Return the names of the rewards that the run's scorers take from the environment. Raises NotReady if no
        reward node has joined, and if one may be too old to list them."""
        names = sorted({name for scorer in await self._scorers(run) for name in scorer.environment_rewards})
        if not names and not self._keeper.fleet.knows(PROTOCOL):
            raise NotReady(
                f"a node has a protocol below {PROTOCOL}, whose reward service does not list the rewards of the "
                "environment; upgrade all nodes (`rollmesh status` lists them), then repeat the call",
                run=run,
            )
        return names

    async def _scorers(self, run: str) -> Sequence[reward_pb2.ScorerInfo]:
        stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(
            await self._channel(NodeKind.REWARD, run)
        )
        with typed_errors():
            listed = await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=self._call_s)
        return listed.scorers

    async def forget_run(self, run: str) -> None:
        """Remove what the data services and the depots store of a run. Raises NotReady without a depot."""
        with typed_errors():
            for address in self._keeper.addresses(NodeKind.DATA, run):
                data: data_pb2_grpc.DataServiceAsyncStub = data_pb2_grpc.DataServiceStub(await self._open(address))
                await data.ForgetRun(data_pb2.ForgetRunRequest(run=run), timeout=self._call_s)
            for address in self._addresses(NodeKind.DEPOT, run):
                depot: weights_pb2_grpc.BlobServiceAsyncStub = weights_pb2_grpc.BlobServiceStub(
                    await self._open(address)
                )
                await depot.ReleaseRun(weights_pb2.ReleaseRunRequest(run=run), timeout=self._call_s)

    def cancel_episodes(self, run: str, command: CancelEpisodes) -> None:
        leases = [to_wire(run, lease_id) for lease_id in command.lease_ids]
        cancel = coordinator_pb2.CancelEpisodes(lease_ids=leases, reason=command.reason)
        self._keeper.send(command.node_id, coordinator_pb2.JoinResponse(cancel=cancel))

    async def missing_blobs(self, run: str, weights_digest: str) -> list[str]:
        """Return what is not uploaded of a version: its manifest, or chunks of it. Empty if a depot has all. A depot
        that serves other bytes, or does not answer, is logged, and the next one is asked.

        Raises HashMismatch that names a corrupt depot, or the error of a call, if no other depot has all.
        """
        missing: list[str] | None = None
        failed: MeshError | None = None
        for address in self._addresses(NodeKind.DEPOT, run):
            try:
                found = await self._missing_at(address, weights_digest)
            except MeshError as error:
                _log.error("depot %s did not confirm version %s: %s", address, weights_digest, error)
                failed = error if failed is None or isinstance(error, HashMismatch) else failed
                continue
            if not found:
                return []
            missing = found if missing is None or len(found) < len(missing) else missing
        if isinstance(failed, HashMismatch) or missing is None:
            assert failed is not None, "there is at least one depot"
            raise failed
        return missing

    async def _missing_at(self, address: str, weights_digest: str) -> list[str]:
        stub: weights_pb2_grpc.BlobServiceAsyncStub = weights_pb2_grpc.BlobServiceStub(await self._open(address))
        with typed_errors():
            answer = await stub.Has(weights_pb2.HasRequest(weights_digest=weights_digest), timeout=self._call_s)
            if answer.version_checked:
                return sorted(answer.missing)
            try:  # a depot of an earlier release
                manifest = await self._manifest(stub, weights_digest, address)
            except UnknownBlob:
                return [weights_digest]
            chunks = sorted({chunk.digest for file in manifest.files for chunk in file.chunks})
            return await self._missing(stub, chunks)

    async def _manifest(
        self, stub: weights_pb2_grpc.BlobServiceAsyncStub, digest: str, address: str
    ) -> weights_pb2.WeightManifest:
        content = bytearray()
        with typed_errors():
            async for piece in stub.Fetch(weights_pb2.FetchRequest(digest=digest), timeout=self._call_s):
                content += piece.data
                if len(content) > MANIFEST_BYTES_MAX:
                    raise UnknownBlob(f"blob {digest} is over {MANIFEST_BYTES_MAX} bytes: not a manifest")
        if (found := hashlib.sha256(content).hexdigest()) != digest:
            raise HashMismatch(
                f"depot {self._keeper.name_of(address)} at {address} is corrupt: for the manifest {digest} it sends "
                f"{len(content)} bytes that hash to {found}; its host or its store is at fault, not the trainer: stop "
                "this depot, and start one whose files are intact",
                address=address,
                digest=digest,
            )
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
        return await self._open(self._addresses(kind, run)[0])

    def _addresses(self, kind: NodeKind, run: str) -> list[str]:
        """Return the nodes of a kind, each time beginning with the next one. Raises NotReady if there is none."""
        addresses = self._keeper.addresses(kind, run)
        if not addresses:
            raise NotReady(f"no {kind.name.lower()} node serves run {run}; start one", kind=kind.name, run=run)
        first = next(self._turn) % len(addresses)
        return addresses[first:] + addresses[:first]

    async def _open(self, address: str) -> MeshChannel:
        if address not in self._channels:
            while len(self._channels) >= CHANNELS_MAX:
                await self._channels.pop(next(iter(self._channels))).close()
            self._channels[address] = open_channel(address, access=self._access)
        return self._channels[address]
