"""Bring versions from the depot or from other nodes into a store: as whole chunks, as deltas to chunks that are here,
or by links on one host.

Nothing is trusted that was not hashed here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from rollmesh.shared.errors import DeadlineExceeded, DiskFull, HashMismatch, MeshError, Unavailable, UnknownBlob
from rollmesh.shared.first_error import first_error
from rollmesh.shared.rpc.status import from_rpc_error, typed_errors
from rollmesh.shared.weights.blobs import BlobStore, PartialBlob
from rollmesh.shared.weights.byte_rate import ByteRate
from rollmesh.shared.weights.delta import apply_delta
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.shared.weights.host import host_id
from rollmesh.shared.weights.manifest import chunk_sizes, parse_manifest
from rollmesh.shared.weights.transfer import TransferConfig
from rollmesh.v1 import weights_pb2, weights_pb2_grpc

MANIFEST_BYTES_MAX = 8 << 20
"""Reserved while a manifest is fetched, whose size is not known before; 8 MiB name about 1 TB in chunks."""
_ROUNDS = 2
"""A blob begun at a bad source and ended at a good one shows only at its end; the second round starts it clean at
each."""
CHANNELS_MAX = 64
"""Sources to which channels stay open. Beyond it, the one used longest ago is closed."""
OpenChannel = Callable[[str], grpc.aio.Channel]
"""Open a channel to host:port, with the run's token."""


class SourceChannels:
    """Channels to sources, and where those of this host store their blobs. They stay open from one version to the next,
    until `close`."""

    def __init__(self, open_channel: OpenChannel) -> None:
        self._open_channel = open_channel
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._directories: dict[str, Path | None] = {}

    async def stub(self, source: str) -> Any:
        """Return the stub of the source's BlobService."""
        if source not in self._channels:
            self._channels[source] = self._open_channel(source)
        channel = self._channels[source]
        self._channels.move_to_end(source)
        if len(self._channels) > CHANNELS_MAX:
            oldest, unused = self._channels.popitem(last=False)
            self._directories.pop(oldest, None)
            await unused.close(None)
        return weights_pb2_grpc.BlobServiceStub(channel)

    async def directory(self, source: str, limit_s: float) -> Path | None:
        """Return the directory of a source on this host; None if it is on another one. Asks each source once. Raises
        `MeshError`."""
        if source not in self._directories:
            with typed_errors():
                reply = await (await self.stub(source)).Has(weights_pb2.HasRequest(), timeout=limit_s)
            here = bool(reply.host_id) and reply.host_id == host_id()
            self._directories[source] = Path(reply.directory) if here else None
        return self._directories[source]

    async def close(self) -> None:
        while self._channels:
            await self._channels.popitem()[1].close(None)


class Fetcher:
    """Fetch the blobs of a version from several sources into a store."""

    def __init__(
        self,
        store: BlobStore,
        sources: SourceChannels,
        config: TransferConfig | None = None,
        deltas: DeltaCache | None = None,
    ) -> None:
        """Deltas that arrive are kept in `deltas` for others. The caller closes `sources`."""
        self.fetched_bytes = 0
        """Bytes that crossed the network, since start."""
        self._store = store
        self._sources = sources
        self._config = config or TransferConfig()
        self._ingress = ByteRate(self._config.ingress_bytes_per_s)
        self._deltas = deltas
        self._slow: set[str] = set()
        """Sources that failed or stalled once. They are asked last, and not waited for."""

    async def version(
        self,
        digest: str,
        sources: Sequence[str],
        *,
        owner: str,
        base: weights_pb2.WeightManifest | None = None,
    ) -> weights_pb2.WeightManifest:
        """Store the manifest and every chunk of it, and return the manifest. Chunks may arrive as deltas to those of
        the stored version `base`.

        Raises `UnknownBlob` if no source has a blob, `HashMismatch` if none has it right, `DiskFull`, `InvalidInput`.
        """
        await self.blob(digest, sources, owner=owner)
        manifest = parse_manifest(await self._store.read_bytes(digest))
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
        """Store one blob, from the first source that has its right bytes. `base` is a stored blob to which a source may
        send a delta."""
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
        if source in self._slow:
            return None
        try:
            return await self._sources.directory(source, self._config.stall_s)
        except MeshError:
            self._slow.add(source)
            return None

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
            except DiskFull:  # of this host, so that no other source can help
                raise
            except HashMismatch as err:
                self._slow.add(source)
                failure, base = err, ""
            except MeshError as err:
                self._slow.add(source)
                failure = _weightier(failure, err)
        raise failure

    async def _receive(self, partial: PartialBlob, digest: str, source: str, base: str, *, wait: bool) -> bytes:
        """Append the bytes of `source` from where a broken transfer stopped. Return the delta, if the source sent
        one."""
        wait_s = self._config.peer_wait_s if wait else 0.0
        request = weights_pb2.FetchRequest(digest=digest, offset=partial.written_bytes, wait_s=wait_s)
        with contextlib.ExitStack() as stack:
            # Opened before the request: a base that is gone or damaged here is not a fault of the source.
            opened = await self._open_base(base, stack) if base and not partial.written_bytes else None
            request.base = base if opened is not None else ""
            delta = bytearray()
            async with contextlib.aclosing(self._pieces(source, request)) as pieces:
                async for data, is_delta in pieces:
                    size = len(delta) if is_delta else 0
                    if partial.too_long_with(size + len(data)) or (is_delta and not request.base):
                        raise HashMismatch(f"{source} sends more bytes of blob {digest} than it has", digest=digest)
                    self.fetched_bytes += len(data)
                    if is_delta:
                        delta += data
                    else:
                        await partial.write(data)
            if delta and opened is not None:
                await partial.write(await asyncio.to_thread(lambda: apply_delta(opened.read(), bytes(delta))))
            return bytes(delta)

    async def _open_base(self, digest: str, stack: contextlib.ExitStack) -> BinaryIO | None:
        """Return the open file of a stored blob, which stays readable if the blob is deleted meanwhile; None if it
        cannot be read."""
        try:
            return stack.enter_context((await self._store.open(digest)).open("rb"))
        except (UnknownBlob, HashMismatch, OSError):
            return None

    async def _pieces(self, source: str, request: weights_pb2.FetchRequest) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Yield the pieces that `source` sends, each with whether it belongs to a delta.

        Raises `DeadlineExceeded` if it sends nothing for `stall_s`, or for some time less than `rate_min_bytes_per_s`:
        it has an allowance of twice `stall_s`, which shrinks while this process waits for it, and grows by the time
        that a piece takes at this rate. Raises the error of the source, `Unavailable` for its full disk.
        """
        now, config = asyncio.get_running_loop().time, self._config
        stub, left_s, num_bytes = await self._sources.stub(source), 2 * config.stall_s, 0
        call = stub.Fetch(request, timeout=config.blob_deadline_s)
        try:
            asked_s = now() + request.wait_s
            async with asyncio.timeout_at(asked_s + config.stall_s) as limit:
                async for reply in call:
                    if data := reply.data:  # each read of the field copies it; an empty piece is not progress
                        limit.reschedule(None)
                        num_bytes += len(data)
                        left_s -= max(0.0, now() - asked_s)
                        left_s = min(2 * config.stall_s, left_s + config.seconds_of(len(data)))
                        await self._ingress.take(len(data))
                        yield data, reply.delta
                        asked_s = now()
                        limit.reschedule(asked_s + min(config.stall_s, left_s))
        except TimeoutError as err:
            what = f"only {num_bytes} bytes" if num_bytes else "nothing"
            raise DeadlineExceeded(
                f"{source} sent {what} of blob {request.digest} before it stalled or was slower than "
                f"rate_min_bytes_per_s = {config.rate_min_bytes_per_s:g}; stall_s = {config.stall_s:g}"
            ) from err
        except grpc.aio.AioRpcError as err:
            failure = from_rpc_error(err)
            raise Unavailable(f"{source}: {failure.message}") if isinstance(failure, DiskFull) else failure from err
        finally:
            call.cancel()


def base_chunks(manifest: weights_pb2.WeightManifest, base: weights_pb2.WeightManifest) -> dict[str, str]:
    """Return chunk -> chunk of `base` at the same place of a file with the same name, if it has the same size."""
    files = {file.name: file.chunks for file in base.files}
    pairs = (pair for file in manifest.files for pair in zip(file.chunks, files.get(file.name, ()), strict=False))
    return {new.digest: old.digest for new, old in pairs if new.size_bytes == old.size_bytes}


def _weightier(failure: MeshError, err: MeshError) -> MeshError:
    """Return the error to report: a wrong hash before a source that failed, and that before a source without the
    blob."""
    if isinstance(failure, HashMismatch):
        return failure
    return failure if isinstance(err, UnknownBlob) and not isinstance(failure, UnknownBlob) else err
