"""BlobService over a `BlobStore`: served by the depot and by every node that holds chunks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

from rollmesh.shared.errors import HashMismatch, InvalidInput, UnknownBlob, field_error
from rollmesh.shared.rpc.handlers import Context
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.byte_rate import ByteRate
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.shared.weights.host import host_id
from rollmesh.shared.weights.manifest import chunk_sizes, is_version_of, parse_manifest
from rollmesh.shared.weights.transfer import DIGESTS_MAX, PIECE_BYTES, PIECE_BYTES_MAX, WAIT_S_MAX
from rollmesh.v1 import weights_pb2, weights_pb2_grpc


class BlobServicer(weights_pb2_grpc.BlobServiceServicer):
    """`writable` is False on nodes: they serve what they fetched and store nothing for others."""

    def __init__(
        self,
        store: BlobStore,
        *,
        writable: bool,
        deltas: DeltaCache | None = None,
        egress: ByteRate | None = None,
    ) -> None:
        """Without `deltas`, every blob is sent whole. `egress` limits what is sent."""
        self._store = store
        self._writable = writable
        self._deltas = deltas
        self._egress = egress or ByteRate(0)

    async def Has(self, request: weights_pb2.HasRequest, context: Context) -> weights_pb2.HasResponse:
        if len(request.digests) > DIGESTS_MAX:
            must = f"have at most {DIGESTS_MAX} entries"
            raise field_error("digests", must, len(request.digests), "send several requests")
        missing = self._store.missing(request.digests)
        if request.weights_digest:
            missing += await self._missing_of(request.weights_digest)
        return weights_pb2.HasResponse(
            missing=missing,
            directory=str(self._store.directory),
            host_id=host_id(),
            version_checked=bool(request.weights_digest),
        )

    async def _missing_of(self, weights_digest: str) -> list[str]:
        """Return the digests that are not stored of a version: its manifest, or chunks of it. Raises `InvalidInput`."""
        try:
            manifest = parse_manifest(await self._store.read_bytes(weights_digest))
        except (UnknownBlob, HashMismatch):
            return [weights_digest]
        return self._store.missing(chunk_sizes(manifest))

    async def Put(
        self, request_iterator: AsyncIterator[weights_pb2.PutRequest], context: Context
    ) -> weights_pb2.PutResponse:
        if not self._writable:
            raise InvalidInput("this node stores nothing for others; put blobs to the depot")
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.digest or not first.owner:
            missing = "digest" if first is None or not first.digest else "owner"
            raise field_error(missing, "be set in the first message", None, "name the digest, the size and the owner")
        if not first.data and first.size_bytes and await self._store.claim(first.digest, owner=first.owner):
            return weights_pb2.PutResponse(existed=True)
        pieces = _pieces(first, request_iterator)
        existed = await self._store.put(first.digest, first.size_bytes, pieces, owner=first.owner)
        return weights_pb2.PutResponse(existed=existed)

    async def Fetch(
        self, request: weights_pb2.FetchRequest, context: Context
    ) -> AsyncIterator[weights_pb2.FetchResponse]:
        if not 0 <= request.wait_s <= WAIT_S_MAX:
            raise field_error("wait_s", f"be in [0, {WAIT_S_MAX:g}]", request.wait_s)
        if request.base and request.offset:
            raise field_error("offset", "be 0 with `base`, because a delta is sent from its beginning", request.offset)
        if request.wait_s:
            await self._store.arrival(request.digest, request.wait_s)
        delta = await self._deltas.get(request.base, request.digest) if request.base and self._deltas else None
        if delta is not None:
            pieces = _cut(delta)
        else:
            pieces = self._store.read(request.digest, offset=request.offset, piece_bytes=PIECE_BYTES)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                await self._egress.take(len(piece))
                yield weights_pb2.FetchResponse(data=piece, delta=delta is not None)

    async def ReleaseRun(
        self, request: weights_pb2.ReleaseRunRequest, context: Context
    ) -> weights_pb2.ReleaseRunResponse:
        if not self._writable:
            raise InvalidInput("this node stores nothing for others; send this to the depot")
        if not request.run:
            raise field_error("run", "name a run", request.run)
        owners = [owner for owner in self._store.owners if is_version_of(owner, request.run)]
        return weights_pb2.ReleaseRunResponse(freed_bytes=sum(self._store.release(owner) for owner in owners))


async def _cut(data: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


async def _pieces(first: weights_pb2.PutRequest, rest: AsyncIterable[weights_pb2.PutRequest]) -> AsyncIterator[bytes]:
    yield _checked(first.data)
    async for message in rest:
        yield _checked(message.data)


def _checked(data: bytes) -> bytes:
    if len(data) > PIECE_BYTES_MAX:
        raise field_error("data", f"have at most {PIECE_BYTES_MAX} bytes", len(data), "send smaller pieces")
    return data


class ManifestServicer(weights_pb2_grpc.WeightServiceServicer):
    """WeightService over a store: GetManifest. Subclasses implement the other calls."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        manifest = parse_manifest(await self._store.read_bytes(request.weights_digest))
        return weights_pb2.GetManifestResponse(manifest=manifest)
