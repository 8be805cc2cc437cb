"""Moving versions between stores: a trainer's upload, a node's fetch.

Nothing is trusted that was not hashed here. On one host bytes do not cross a socket: an upload writes chunks into the store's own
directory (which verifies them when they are claimed), a fetch links the peer's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rollmesh.shared.errors import HashMismatch, MeshError, UnknownBlob
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.weights.blobs import PARTIAL_SUFFIX, BlobStore, PartialBlob
from rollmesh.shared.weights.host import host_id
from rollmesh.shared.weights.manifest import BuiltManifest, ChunkSource, chunk_sizes, parse_manifest
from rollmesh.shared.weights.servicer import DIGESTS_MAX, PIECE_BYTES
from rollmesh.v1 import weights_pb2, weights_pb2_grpc

MANIFEST_BYTES_MAX = 8 << 20
"""Reserved while a manifest is fetched, whose size is not known before; 8 MiB name about 1 TB in chunks."""
_ROUNDS = 2
"""A blob begun at a bad source and ended at a good one shows only at its end; the second round starts it clean at each."""


class TransferConfig(Settings):
    """How blobs are moved."""

    concurrency: PositiveInt = 4
    """Blobs on their way at once. More hides latency to far sources; on one host the disk is the limit."""
    blob_deadline_s: PositiveFloat = 120.0
    """Limit of one blob's transfer from one source."""
    same_host: bool = True
    """Whether a peer's directory on this host is used instead of the network."""


OpenChannel = Callable[[str], grpc.aio.Channel]
"""Opens a channel to host:port, with the run's token."""


# Upload ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReport:
    """What an upload did. `sent_bytes` crossed the network, `written_bytes` went through the store's directory."""

    sent_bytes: int
    written_bytes: int
    num_existed: int


async def upload(
    channel: grpc.aio.Channel, built: BuiltManifest, *, owner: str, config: TransferConfig | None = None
) -> UploadReport:
    """Stores a version's chunks, then its manifest, so that a stored manifest never names a missing chunk. Repeatable.

    Raises `DiskFull`, or `HashMismatch` if the files changed since the manifest was built.
    """
    uploader = _Uploader(channel, owner, config or TransferConfig())
    await uploader.look(list(built.chunks))
    limit = asyncio.Semaphore(uploader.config.concurrency)
    async with _first_error(), asyncio.TaskGroup() as group:
        for digest, source in built.chunks.items():
            group.create_task(uploader.store_within(limit, digest, source))
    await uploader.send(built.weights_digest, built.data)  # small: one message is cheaper than a file
    return UploadReport(
        sent_bytes=uploader.sent_bytes, written_bytes=uploader.written_bytes, num_existed=uploader.num_existed
    )


class _Uploader:
    """One upload to one store."""

    def __init__(self, channel: grpc.aio.Channel, owner: str, config: TransferConfig) -> None:
        self.config = config
        self.sent_bytes = 0
        self.written_bytes = 0
        self.num_existed = 0
        self._stub = weights_pb2_grpc.BlobServiceStub(channel)
        self._owner = owner
        self._missing: set[str] = set()
        self._directory: Path | None = None

    async def look(self, digests: Sequence[str]) -> None:
        """Asks what is missing, and whether the store's directory can be written from here."""
        for start in range(0, len(digests), DIGESTS_MAX):
            with typed_errors():
                reply = await self._stub.Has(weights_pb2.HasRequest(digests=digests[start : start + DIGESTS_MAX]))
            self._missing |= set(reply.missing)
            if self.config.same_host and reply.host_id and reply.host_id == host_id():
                directory = Path(reply.directory)
                self._directory = directory if os.access(directory, os.W_OK | os.X_OK) else None

    async def store_within(self, limit: asyncio.Semaphore, digest: str, source: ChunkSource) -> None:
        async with limit:
            if digest not in self._missing:
                # Claimed all the same: without this owner, the blob would go with the version that brought it.
                with contextlib.suppress(HashMismatch):
                    await self._put(digest, b"", source.size_bytes)
                    self.num_existed += 1
                    return
            await self.store(digest, await asyncio.to_thread(_read, source))

    async def store(self, digest: str, data: bytes) -> None:
        """By the directory where possible, else (or when that fails) by the network."""
        if self._directory is not None:
            with contextlib.suppress(OSError, HashMismatch):
                await asyncio.to_thread(_write_blob, self._directory, digest, data)
                await self._put(digest, b"", len(data))
                self.written_bytes += len(data)
                return
        await self.send(digest, data)

    async def send(self, digest: str, data: bytes) -> None:
        await self._put(digest, data, len(data))
        self.sent_bytes += len(data)

    async def _put(self, digest: str, data: bytes, size_bytes: int) -> None:
        head = weights_pb2.PutRequest(digest=digest, size_bytes=size_bytes, owner=self._owner)
        with typed_errors():
            await self._stub.Put(_put_requests(head, data), timeout=self.config.blob_deadline_s)


async def _put_requests(head: weights_pb2.PutRequest, data: bytes) -> AsyncIterator[weights_pb2.PutRequest]:
    head.data = data[:PIECE_BYTES]
    yield head
    for start in range(PIECE_BYTES, len(data), PIECE_BYTES):
        yield weights_pb2.PutRequest(data=data[start : start + PIECE_BYTES])


def _read(source: ChunkSource) -> bytes:
    with source.path.open("rb") as file:
        file.seek(source.offset)
        return file.read(source.size_bytes)


def _write_blob(directory: Path, digest: str, data: bytes) -> None:
    partial = directory / f"{digest}.upload-{os.getpid()}{PARTIAL_SUFFIX}"
    try:
        partial.write_bytes(data)
        partial.replace(directory / digest)
    finally:
        partial.unlink(missing_ok=True)


# Fetch ----------------------------------------------------------------------------------------------------------------


class Fetcher:
    """Brings blobs from several sources into a store. Channels stay open until `close`."""

    def __init__(self, store: BlobStore, open_channel: OpenChannel, config: TransferConfig | None = None) -> None:
        self.fetched_bytes = 0
        """Bytes that crossed the network, since start."""
        self._store = store
        self._open_channel = open_channel
        self._config = config or TransferConfig()
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    async def version(self, digest: str, sources: Sequence[str], *, owner: str) -> weights_pb2.WeightManifest:
        """Stores the manifest and every chunk of it; returns the manifest.

        Raises `UnknownBlob` if no source has a blob, `HashMismatch` if none has it right, `DiskFull`, `InvalidInput`.
        """
        await self.blob(digest, sources, owner=owner)
        path = await self._store.open(digest)
        manifest = parse_manifest(await asyncio.to_thread(path.read_bytes))
        limit = asyncio.Semaphore(self._config.concurrency)
        async with _first_error(), asyncio.TaskGroup() as group:
            for chunk, size_bytes in chunk_sizes(manifest).items():
                group.create_task(self._blob_within(limit, chunk, sources, owner, size_bytes))
        return manifest

    async def blob(
        self, digest: str, sources: Sequence[str], *, owner: str, size_bytes_max: int = MANIFEST_BYTES_MAX
    ) -> None:
        """Stores one blob, from the first source that has it right."""
        with contextlib.suppress(HashMismatch, UnknownBlob):  # ours is damaged: fetch it again
            if await self._store.claim(digest, owner=owner):
                return
        if self._config.same_host and await self._link(digest, sources, owner):
            return
        with self._store.partial(digest, size_bytes_max) as partial:
            await self._download(partial, digest, sources, owner)

    async def _blob_within(
        self, limit: asyncio.Semaphore, digest: str, sources: Sequence[str], owner: str, size_bytes: int
    ) -> None:
        async with limit:
            await self.blob(digest, sources, owner=owner, size_bytes_max=size_bytes)

    async def _link(self, digest: str, sources: Sequence[str], owner: str) -> bool:
        for source in sources:
            try:
                with typed_errors():
                    reply = await self._stub(source).Has(weights_pb2.HasRequest(digests=[digest]))
            except MeshError:
                continue  # an unreachable source is the download's business
            here = reply.host_id and reply.host_id == host_id() and digest not in reply.missing
            if here and await self._store.adopt(Path(reply.directory) / digest, digest, owner=owner):
                return True
        return False

    async def _download(self, partial: PartialBlob, digest: str, sources: Sequence[str], owner: str) -> None:
        failure: MeshError = UnknownBlob(f"there is no source for blob {digest}; upload it again", digest=digest)
        for source in list(sources) * _ROUNDS:
            try:
                await self._receive(partial, digest, source)
                await partial.commit(owner=owner)
                return
            except HashMismatch as err:
                partial.reset()
                failure = err
            except MeshError as err:
                failure = _weightier(failure, err)
        raise failure

    async def _receive(self, partial: PartialBlob, digest: str, source: str) -> None:
        """Appends what `source` has beyond what is there: a broken transfer goes on where it stopped."""
        request = weights_pb2.FetchRequest(digest=digest, offset=partial.written_bytes)
        with typed_errors():
            async for reply in self._stub(source).Fetch(request, timeout=self._config.blob_deadline_s):
                if partial.too_long_with(len(reply.data)):
                    raise HashMismatch(f"{source} sends more bytes of blob {digest} than it has", digest=digest)
                await partial.write(reply.data)
                self.fetched_bytes += len(reply.data)

    def _stub(self, source: str) -> Any:
        if source not in self._channels:
            self._channels[source] = self._open_channel(source)
        return weights_pb2_grpc.BlobServiceStub(self._channels[source])


def _weightier(failure: MeshError, err: MeshError) -> MeshError:
    """A wrong hash says more than a source that is away, and that more than one that doesn't have it."""
    if isinstance(failure, HashMismatch):
        return failure
    return failure if isinstance(err, UnknownBlob) and not isinstance(failure, UnknownBlob) else err


@contextlib.asynccontextmanager
async def _first_error() -> AsyncIterator[None]:
    """Unwraps a TaskGroup's group into the first error in it: callers catch `DiskFull`, not groups."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
