"""WeightService of an inference node: the weight commands of the Join stream as calls."""

from __future__ import annotations

import asyncio

from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.weights import WeightKeeper
from rollmesh.shared.codec.refusal import invalid
from rollmesh.shared.codec.trajectory import decode_version
from rollmesh.shared.rpc.addresses import is_address
from rollmesh.shared.rpc.handlers import Context
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.v1 import weights_pb2, weights_pb2_grpc


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Translates between protobuf and `WeightKeeper`."""

    def __init__(self, keeper: WeightKeeper, store: BlobStore) -> None:
        self._keeper = keeper
        self._store = store

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        path = await self._store.open(request.weights_digest)
        manifest = parse_manifest(await asyncio.to_thread(path.read_bytes))
        return weights_pb2.GetManifestResponse(manifest=manifest)

    async def Prepare(self, request: weights_pb2.PrepareRequest, context: Context) -> weights_pb2.PrepareResponse:
        for index, source in enumerate(request.sources):
            if not is_address(source):
                invalid(f"sources[{index}]", f"must be host:port or unix:PATH, got {source[:100]!r}")
        fetched_bytes = await self._keeper.prepare(decode_version(request.version), list(request.sources))
        return weights_pb2.PrepareResponse(fetched_bytes=fetched_bytes)

    async def Activate(self, request: weights_pb2.ActivateRequest, context: Context) -> weights_pb2.ActivateResponse:
        keep = request.kv == weights_pb2.ActivateRequest.KV_POLICY_KEEP
        kv = KvPolicy.KEEP if keep else KvPolicy.RECOMPUTE
        probe_error = await self._keeper.activate(decode_version(request.version), kv)
        return weights_pb2.ActivateResponse(probe_error=probe_error)

    async def Discard(self, request: weights_pb2.DiscardRequest, context: Context) -> weights_pb2.DiscardResponse:
        await self._keeper.discard(decode_version(request.version))
        return weights_pb2.DiscardResponse()
