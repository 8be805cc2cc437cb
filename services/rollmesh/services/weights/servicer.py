"""The depot's services: blobs with retention, and manifests. It prepares and activates nothing (UNIMPLEMENTED)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rollmesh.services.weights.retention import outdated
from rollmesh.shared.errors import Unimplemented
from rollmesh.shared.rpc.handlers import Context
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.shared.weights.servicer import BlobServicer
from rollmesh.v1 import weights_pb2, weights_pb2_grpc


class DepotBlobServicer(BlobServicer):
    """BlobService that drops old versions as new ones arrive."""

    def __init__(self, store: BlobStore, *, versions_max: int) -> None:
        super().__init__(store, writable=True)
        self._versions_max = versions_max

    async def Put(
        self, request_iterator: AsyncIterator[weights_pb2.PutRequest], context: Context
    ) -> weights_pb2.PutResponse:
        response = await super().Put(request_iterator, context)
        for owner in outdated(self._store.owners, versions_max=self._versions_max):
            self._store.release(owner)
        return response


class DepotWeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """GetManifest over the store; the rest needs an engine."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        path = await self._store.open(request.weights_digest)
        manifest = parse_manifest(await asyncio.to_thread(path.read_bytes))
        return weights_pb2.GetManifestResponse(manifest=manifest)

    async def Prepare(self, request: weights_pb2.PrepareRequest, context: Context) -> weights_pb2.PrepareResponse:
        raise _no_engine()

    async def Activate(self, request: weights_pb2.ActivateRequest, context: Context) -> weights_pb2.ActivateResponse:
        raise _no_engine()

    async def Discard(self, request: weights_pb2.DiscardRequest, context: Context) -> weights_pb2.DiscardResponse:
        raise _no_engine()


def _no_engine() -> Unimplemented:
    return Unimplemented("the depot has no engine; send this to an inference node")
