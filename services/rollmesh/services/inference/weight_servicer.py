"""WeightService of an inference node: the weight commands of the Join stream as calls."""

from __future__ import annotations

from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.weights import WeightKeeper
from rollmesh.shared.codec.trajectory import decode_version
from rollmesh.shared.errors import field_error
from rollmesh.shared.rpc.addresses import is_address
from rollmesh.shared.rpc.handlers import Context
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.servicer import ManifestServicer
from rollmesh.v1 import weights_pb2


class WeightServicer(ManifestServicer):
    """Translates between protobuf and `WeightKeeper`."""

    def __init__(self, keeper: WeightKeeper, store: BlobStore) -> None:
        self._keeper = keeper
        super().__init__(store)

    async def Prepare(self, request: weights_pb2.PrepareRequest, context: Context) -> weights_pb2.PrepareResponse:
        for index, source in enumerate(request.sources):
            if not is_address(source):
                raise field_error(f"sources[{index}]", "be host:port or unix:PATH", source)
        fetched_bytes = await self._keeper.prepare(decode_version(request.version), list(request.sources))
        return weights_pb2.PrepareResponse(fetched_bytes=fetched_bytes)

    async def Activate(self, request: weights_pb2.ActivateRequest, context: Context) -> weights_pb2.ActivateResponse:
        keep = request.kv == weights_pb2.ActivateRequest.KV_POLICY_KEEP
        kv = KvPolicy.KEEP if keep else KvPolicy.RECOMPUTE
        retain = [decode_version(old) for old in request.retain]
        probe_error = await self._keeper.activate(decode_version(request.version), kv, retain)
        return weights_pb2.ActivateResponse(probe_error=probe_error)

    async def Discard(self, request: weights_pb2.DiscardRequest, context: Context) -> weights_pb2.DiscardResponse:
        await self._keeper.discard(decode_version(request.version))
        return weights_pb2.DiscardResponse()
