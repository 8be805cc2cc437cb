"""Bring versions from the depot or from other nodes into a store: as whole chunks, as deltas to chunks that are here, or by links on one host.

Nothing is trusted that was not hashed here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from rollmesh.shared.errors import DeadlineExceeded, HashMismatch, MeshError, UnknownBlob
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.blobs import BlobStore, PartialBlob
from rollmesh.shared.weights.byte_rate import ByteRate
from rollmesh.shared.weights.delta import apply_delta
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.shared.weights.host import host_id
from rollmesh.shared.weights.manifest import chunk_sizes, parse_manifest
from rollmesh.shared.weights.transfer import TransferConfig, first_error
from rollmesh.v1 import weights_pb2, weights_pb2_grpc

MANIFEST_BYTES_MAX = 8 << 20
"""Reserved while a manifest is fetched, whose size is not known before; 8 MiB name about 1 TB in chunks."""
_ROUNDS = 2
"""A blob begun at a bad source and ended at a good one shows only at its end; the second round starts it clean at each."""
OpenChannel = Callable[[str], grpc.aio.Channel]
"""Opens a channel to host:port, with the run's token."""


class Fetcher:
    """Brings blobs from several sources into a store. Channels stay open until `close`."""

    def __init__(
        self,
        store: BlobStore,
        open_channel: OpenChannel,
        config: TransferConfig | None = None,
        deltas: DeltaCache | None = None,
    ) -> None:
        """Deltas that arrive are kept in `deltas` for others."""
        self.fetched_bytes = 0
        """Bytes that crossed the network, since start."""
        self._store = store
        self._open_channel = open_channel
        self._config = config or TransferConfig()
        self._ingress = ByteRate(self._config.ingress_bytes_per_s)
        self._deltas = deltas
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._directories: dict[str, Path | None] = {}
        """Directory of a source on this host; None if it is on another one."""
        self._slow: set[str] = set()
        """Sources that failed or stalled once. They are asked last, and not waited for."""

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    async def version(
        self,
        digest: str,
        sources: Sequence[str],
        *,
        owner: str,
        base: weights_pb2.WeightManifest | None = None,
    ) -> weights_pb2.WeightManifest:
        """Stores the manifest and every chunk of it; returns the manifest. Chunks may come as deltas to those of the stored version `base`.

        Raises `UnknownBlob` if no source has a blob, `HashMismatch` if none has it right, `DiskFull`, `InvalidInput`.
        """
        await self.blob(digest, sources, owner=owner)
        path = await self._store.open(digest)
        manifest = parse_manifest(await asyncio.to_thread(path.read_bytes))
        bases = base_chunks(manifest, base) if base is not None else {}
        limit = asyncio.Semaphore(self._config.concurrency)
        async with first_error(), asyncio.TaskGroup() as group:
            for chunk, size_bytes in chunk_sizes(manifest).items():
                group.create_task(self._blob_within(limit, chunk, sources, owner, size_bytes, bases.get(chunk, "")))
        return manifest

    async def blob(
        self,
        digest: str,
        sources: Sequence[str],
        *,
        owner: str,
        size_bytes_max: int = MANIFEST_BYTES_MAX,
        base: str = "",
    ) -> None:
        """Stores one blob, from the first source that has it right. `base` is a stored blob to which a source may send a delta."""
        with contextlib.suppress(HashMismatch, UnknownBlob):  # ours is damaged: fetch it again
            if await self._store.claim(digest, owner=owner):
                return
        if self._config.same_host and await self._link(digest, sources, owner):
            return
        with self._store.partial(digest, size_bytes_max) as partial:
            await self._download(partial, digest, sources, owner, base)

    async def _blob_within(
        self, limit: asyncio.Semaphore, digest: str, sources: Sequence[str], owner: str, size_bytes: int, base: str
    ) -> None:
        async with limit:
            await self.blob(digest, sources, owner=owner, size_bytes_max=size_bytes, base=base)

    async def _link(self, digest: str, sources: Sequence[str], owner: str) -> bool:
        for source in sources:
            directory = await self._directory(source)
            if directory is not None and await self._store.adopt(directory / digest, digest, owner=owner):
                return True
        return False

    async def _directory(self, source: str) -> Path | None:
        if source not in self._directories:
            self._directories[source] = None
            try:
                with typed_errors():
                    reply = await self._stub(source).Has(weights_pb2.HasRequest(), timeout=self._config.stall_s)
            except MeshError:
                self._slow.add(source)
                return None
            if reply.host_id and reply.host_id == host_id():
                self._directories[source] = Path(reply.directory)
        return self._directories[source]

    async def _download(self, partial: PartialBlob, digest: str, sources: Sequence[str], owner: str, base: str) -> None:
        failure: MeshError = UnknownBlob(f"there is no source for blob {digest}; upload it again", digest=digest)
        for number, source in enumerate(sorted(sources, key=self._slow.__contains__) * _ROUNDS):
            last = number % len(sources) == len(sources) - 1
            if isinstance(failure, HashMismatch):
                partial.reset()  # a wrong beginning of one source would spoil what the next one sends
            try:
                delta = await self._receive(partial, digest, source, base, wait=not last and source not in self._slow)
                await partial.commit(owner=owner)
                if delta and self._deltas is not None:
                    self._deltas.add(base, digest, delta)
                return
            except HashMismatch as err:
                self._slow.add(source)
                failure, base = err, ""
            except MeshError as err:
                self._slow.add(source)
                failure = _weightier(failure, err)
        raise failure

    async def _receive(self, partial: PartialBlob, digest: str, source: str, base: str, *, wait: bool) -> bytes:
        """Appends what `source` has beyond what is there: a broken transfer continues where it stopped. Returns the delta, if one came."""
        wait_s = self._config.peer_wait_s if wait else 0.0
        request = weights_pb2.FetchRequest(digest=digest, offset=partial.written_bytes, wait_s=wait_s)
        with contextlib.ExitStack() as stack:
            # Opened before the request: a base that is gone or damaged here is not a fault of the source.
            opened = await self._open_base(base, stack) if base and not partial.written_bytes else None
            request.base = base if opened is not None else ""
            delta = bytearray()
            with typed_errors():
                async with contextlib.aclosing(self._pieces(source, request)) as pieces:
                    async for reply in pieces:
                        size = len(delta) if reply.delta else 0
                        if partial.too_long_with(size + len(reply.data)) or (reply.delta and not request.base):
                            raise HashMismatch(f"{source} sends more bytes of blob {digest} than it has", digest=digest)
                        self.fetched_bytes += len(reply.data)
                        if reply.delta:
                            delta += reply.data
                        else:
                            await partial.write(reply.data)
            if delta and opened is not None:
                await partial.write(await asyncio.to_thread(lambda: apply_delta(opened.read(), bytes(delta))))
            return bytes(delta)

    async def _open_base(self, digest: str, stack: contextlib.ExitStack) -> BinaryIO | None:
        """Return the open file of a stored blob, which stays readable if the blob is deleted meanwhile; None if it cannot be read."""
        try:
            return stack.enter_context((await self._store.open(digest)).open("rb"))
        except (UnknownBlob, HashMismatch, OSError):
            return None

    async def _pieces(
        self, source: str, request: weights_pb2.FetchRequest
    ) -> AsyncGenerator[weights_pb2.FetchResponse, None]:
        """Yield the pieces that `source` sends. Raises `DeadlineExceeded` if it sends nothing for `stall_s`."""
        now, stall_s = asyncio.get_running_loop().time, self._config.stall_s
        call = self._stub(source).Fetch(request, timeout=self._config.blob_deadline_s)
        try:
            async with asyncio.timeout_at(now() + request.wait_s + stall_s) as limit:
                async for reply in call:
                    if reply.data:  # empty pieces are not progress
                        limit.reschedule(None)
                        await self._ingress.take(len(reply.data))
                        yield reply
                        limit.reschedule(now() + stall_s)
        except TimeoutError as err:
            raise DeadlineExceeded(f"{source} sent nothing of blob {request.digest} for {stall_s:g} s") from err
        finally:
            call.cancel()

    def _stub(self, source: str) -> Any:
        if source not in self._channels:
            self._channels[source] = self._open_channel(source)
        return weights_pb2_grpc.BlobServiceStub(self._channels[source])


def base_chunks(manifest: weights_pb2.WeightManifest, base: weights_pb2.WeightManifest) -> dict[str, str]:
    """Return chunk -> chunk of `base` at the same place of a file with the same name, if it has the same size."""
    files = {file.name: file.chunks for file in base.files}
    pairs = (pair for file in manifest.files for pair in zip(file.chunks, files.get(file.name, ()), strict=False))
    return {new.digest: old.digest for new, old in pairs if new.size_bytes == old.size_bytes}


def _weightier(failure: MeshError, err: MeshError) -> MeshError:
    """A wrong hash says more than a source that is away, and that more than one that doesn't have it."""
    if isinstance(failure, HashMismatch):
        return failure
    return failure if isinstance(err, UnknownBlob) and not isinstance(failure, UnknownBlob) else err
