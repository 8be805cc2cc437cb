"""The services of the depot: blobs with retention, and manifests. Prepare, Activate and Discard are UNIMPLEMENTED."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable

from rollmesh.shared.errors import Unimplemented
from rollmesh.shared.rpc.handlers import Context
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.byte_rate import ByteRate
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.shared.weights.servicer import BlobServicer, ManifestServicer
from rollmesh.v1 import weights_pb2

_OWNER = re.compile(r"weights:(?P<policy>.+)@(?P<step>\d+)\.(?P<incarnation>\d+)")
"""The owner of the blobs of a version. Releasing the owner deletes them."""
LEFT_OVER_S = 600.0
"""Age from which a file that an upload did not finish is left over, in seconds. An upload that is only slow sends the
file again."""


class DepotBlobServicer(BlobServicer):
    """BlobService that keeps the newest versions of each run's policy."""

    def __init__(
        self,
        store: BlobStore,
        *,
        versions_max: int,
        deltas: DeltaCache | None = None,
        egress: ByteRate | None = None,
    ) -> None:
        super().__init__(store, writable=True, deltas=deltas, egress=egress)
        self._versions_max = versions_max

    async def Put(
        self, request_iterator: AsyncIterator[weights_pb2.PutRequest], context: Context
    ) -> weights_pb2.PutResponse:
        response = await super().Put(request_iterator, context)
        old = outdated(self._store.owners, versions_max=self._versions_max)
        for owner in old:
            self._store.release(owner)
        if old:
            self._store.sweep(LEFT_OVER_S)
        return response


class DepotWeightServicer(ManifestServicer):
    """Serves GetManifest. The other calls need an engine."""

    async def Prepare(self, request: weights_pb2.PrepareRequest, context: Context) -> weights_pb2.PrepareResponse:
        raise _no_engine()

    async def Activate(self, request: weights_pb2.ActivateRequest, context: Context) -> weights_pb2.ActivateResponse:
        raise _no_engine()

    async def Discard(self, request: weights_pb2.DiscardRequest, context: Context) -> weights_pb2.DiscardResponse:
        raise _no_engine()


def _no_engine() -> Unimplemented:
    return Unimplemented("the depot has no engine; send this to an inference node")


def outdated(owners: Iterable[str], *, versions_max: int) -> list[str]:
    """Return the owners beyond the newest `versions_max` of their run's policy; owners that are not versions are
    ignored.

    Any step of a newer incarnation is newer than all steps of an older one, because a roll-back makes those void.
    """
    by_policy: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for owner in owners:
        if match := _OWNER.fullmatch(owner):
            by_policy[match["policy"]].append((int(match["incarnation"]), int(match["step"]), owner))
    return [owner for versions in by_policy.values() for *_, owner in sorted(versions)[:-versions_max]]
