"""A trainer's upload of a version, and the limits of transfers in both directions (`fetcher` brings versions to nodes).

On one host bytes do not cross a socket: an upload writes chunks into the store's own directory, which verifies them
when they are claimed. Free of numpy, because thin clients upload.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
from msgspec import Meta

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from rollmesh.shared.errors import HashMismatch
from rollmesh.shared.first_error import first_error
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.blobs import PARTIAL_SUFFIX, UPLOAD_MARK
from rollmesh.shared.weights.host import host_id
from rollmesh.shared.weights.manifest import BuiltManifest, ChunkSource
from rollmesh.v1 import weights_pb2, weights_pb2_grpc

DIGESTS_MAX = 10_000
"""Most digests in one call of Has."""
PIECE_BYTES = 1 << 20
"""Size of the pieces in which blobs are sent."""
PIECE_BYTES_MAX = 2 << 20
"""Largest piece of a blob in one message; throughput falls to a quarter above 4 MiB."""
WAIT_S_MAX = 60.0
"""Longest time that a call waits for a blob, in seconds."""


class TransferConfig(Settings):
    """How blobs are moved."""

    concurrency: PositiveInt = 4
    """Blobs on their way at once. More hides latency to far sources; on one host the disk is the limit."""
    blob_deadline_s: PositiveFloat = 120.0
    """Limit of one blob's transfer from one source."""
    stall_s: PositiveFloat = 5.0
    """Time without a byte after which another source is asked, in seconds."""
    rate_min_bytes_per_s: NonNegativeFloat = 65536.0
    """Rate below which a source counts as stalled, in bytes per second and blob, so that one that sends a byte now and
    then does not hold a version up for `blob_deadline_s`. Lower it for links that are shared by many nodes; 0 means no
    minimum."""
    peer_wait_s: Annotated[float, Meta(ge=0, le=WAIT_S_MAX)] = 2.0
    """Time to wait for a blob that is on its way to a source, in seconds. The last source is not waited for."""
    ingress_bytes_per_s: NonNegativeFloat = 0.0
    """Limit of what this process receives, in bytes per second; 0 means unlimited."""
    same_host: bool = True
    """Whether a peer's directory on this host is used instead of the network."""

    def seconds_of(self, num_bytes: int) -> float:
        """Return how long `num_bytes` take at the minimum rate."""
        return num_bytes / self.rate_min_bytes_per_s if self.rate_min_bytes_per_s else float("inf")


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
    async with first_error(), asyncio.TaskGroup() as group:
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
                # Add this version as an owner. Otherwise the blob would be deleted with the version that uploaded it.
                with contextlib.suppress(HashMismatch):
                    await self._put(digest, b"", source.size_bytes)
                    self.num_existed += 1
                    return
            await self.store(digest, source)

    async def store(self, digest: str, source: ChunkSource) -> None:
        """Store a chunk through the shared directory, or over the network if there is none or that fails."""
        if self._directory is not None:
            with contextlib.suppress(OSError, HashMismatch):
                await asyncio.to_thread(_write_blob, self._directory, digest, source)
                await self._put(digest, b"", source.size_bytes)
                self.written_bytes += source.size_bytes
                return
        await self.send(digest, await asyncio.to_thread(_read, source))

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


def _write_blob(directory: Path, digest: str, source: ChunkSource) -> None:
    partial = directory / f"{digest}{UPLOAD_MARK}{os.getpid()}{PARTIAL_SUFFIX}"
    try:
        partial.write_bytes(_read(source))
        partial.replace(directory / digest)
    finally:
        partial.unlink(missing_ok=True)
