"""Content-addressed blobs in a directory: `<directory>/<sha256>`, visible only when their bytes hash to their name.

A blob is written to a partial file and renamed. Readers may follow one that is being written, except its last piece,
which they get when the bytes are verified; so no reader gets all bytes of a wrong blob. Each blob has owners; a blob
without an owner is deleted. Files that another process of this host put into the directory (a same-host upload) are
added by `claim`, which hashes them first. Blobs from before a restart are hashed at their first use, because a crash of
the host may have truncated them.

Used on one event loop; hashing, reading and writing of more than `SMALL_BYTES` happen in threads. One process owns a
directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.errors import ConfigError, DiskFull, HashMismatch, Phrase, UnknownBlob, field_error
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.weights.digests import check_digest, sha256_of_file
from rollmesh.shared.weights.owners import OwnerJournal

PARTIAL_SUFFIX = ".partial"
UPLOAD_MARK = ".upload-"
"""Part of the name of a partial file that another process of this host writes."""
SMALL_BYTES = 64 * 1024
"""Bytes that are hashed, read or written on the event loop. They take 0.1 ms, and a thread takes longer to begin on a
busy machine."""
LINKED_BYTES = 2 * 1024 * 1024
"""Bytes of a file of this host that are hashed on the event loop before it is claimed or adopted. They take 1 to 5 ms,
and are one file per version of a small model. The pieces of a large one would block the loop one after the other."""
T = TypeVar("T")


class BlobStore:
    """One directory of blobs with a quota. `start` before use, `close` after."""

    def __init__(self, directory: Path, *, quota_bytes: int, durable: bool = True, clock: Clock | None = None) -> None:
        """Blobs of a `durable` store are on the disk before they are visible; those of another one may be lost with the
        host."""
        self.durable = durable
        self.directory = directory.absolute()
        self._quota_bytes = quota_bytes
        self._clock = clock or SystemClock()
        self._sizes: dict[str, int] = {}
        self._verified: set[str] = set()
        self._reserved_bytes = 0
        self._partial_numbers = itertools.count()
        self._arrivals: dict[str, set[asyncio.Future[None]]] = {}
        """Futures that are done when the blob is stored or its first bytes are there, one for each caller that
        waits."""
        self._incoming: dict[str, PartialBlob] = {}
        """Blobs that are being written, for readers to follow."""
        self._owners = OwnerJournal(self.directory / "owners.jsonl")
        self._lock: BinaryIO | None = None

    # Life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the directory and clean up after a crash. Raises `ConfigError` if another process has it open."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        for partial in self.directory.glob(f"*{PARTIAL_SUFFIX}"):
            partial.unlink(missing_ok=True)
        self._owners.open()
        for path in self.directory.iterdir():
            if len(path.name) == 64:
                self._sizes[path.name] = path.stat().st_size
        for digest in [d for d in self._sizes if not self._owners.owners_of(d)]:
            self._delete(digest)

    def close(self) -> None:
        self._owners.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Asking -----------------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes stored and being written."""
        return sum(self._sizes.values()) + self._reserved_bytes

    @property
    def owners(self) -> frozenset[str]:
        return self._owners.owners

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests that are not stored, in order. A damaged blob is detected at its first use and is missing
        from then on."""
        return [digest for digest in digests if digest not in self._sizes]

    async def arrival(self, digest: str, limit_s: float) -> None:
        """Wait until a blob is stored or its first bytes are there, at most `limit_s` seconds."""
        if digest in self._sizes or ((partial := self._incoming.get(digest)) and partial.can_be_followed):
            return
        arrived = asyncio.get_running_loop().create_future()
        waiting = self._arrivals.setdefault(digest, set())
        waiting.add(arrived)
        try:
            await asyncio.wait([arrived], timeout=limit_s)
        finally:
            waiting.discard(arrived)
            if not waiting:
                self._arrivals.pop(digest, None)

    async def open(self, digest: str) -> Path:
        """Return the path of a stored blob whose hash this store has verified. Raises `UnknownBlob`."""
        check_digest(digest)
        if digest not in self._sizes:
            raise UnknownBlob(f"blob {digest} is not stored here; ask another source", digest=digest)
        path = self.directory / digest
        if digest not in self._verified:
            await self._verify(path, digest)
        return path

    async def read(self, digest: str, *, offset: int = 0, piece_bytes: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Yield the blob's bytes from `offset` in pieces, also of a blob that is being written.

        Raises `UnknownBlob`, also if the writer stops; `HashMismatch` if what was written turns out to be wrong;
        `InvalidInput` for an offset past the end.
        """
        if digest not in self._sizes and (partial := self._incoming.get(digest)) is not None:
            if not 0 <= offset <= partial.size_bytes:
                raise field_error("offset", f"be in [0, {partial.size_bytes}], the size of blob {digest}", offset)
            async with contextlib.aclosing(partial.follow(offset, piece_bytes)) as pieces:
                async for piece in pieces:
                    offset += len(piece)
                    yield piece
        path = await self.open(digest)
        size = self._sizes[digest]
        if not 0 <= offset <= size:
            raise field_error("offset", f"be in [0, {size}], the size of blob {digest}", offset)
        with path.open("rb") as file:  # an open file remains readable after its deletion
            file.seek(offset)
            while offset < size and (piece := await run_sized(size - offset, lambda: file.read(piece_bytes))):
                offset += len(piece)
                yield piece

    async def read_bytes(self, digest: str) -> bytes:
        """Return a whole blob, such as a manifest. Raises like `open`."""
        path = await self.open(digest)
        return await run_sized(self._sizes[digest], path.read_bytes)

    # Storing ----------------------------------------------------------------------------------------------------------

    async def claim(self, digest: str, *, owner: str) -> bool:
        """Make `owner` an owner of a stored blob, also of one that a peer on this host wrote. Return False if it does
        not exist.

        Raises `HashMismatch` for a file with other bytes, which is deleted, and `DiskFull`, after deleting it too.
        """
        check_digest(digest)
        path = self.directory / digest
        if digest not in self._sizes:
            if not path.is_file():
                return False
            size = path.stat().st_size
            self._check_quota(size, after_deleting=path)
            self._sizes[digest] = size
        self._owners.add(owner, digest)  # before the wait: a release meanwhile must not delete it
        await self._verify(path, digest)
        return True

    async def put(self, digest: str, size_bytes: int, pieces: AsyncIterable[bytes], *, owner: str) -> bool:
        """Store a blob. Return whether it was already stored; `pieces` is then not read.

        Raises `HashMismatch` if the bytes do not match the digest, `InvalidInput` if they are more than announced,
        `DiskFull`.
        """
        check_digest(digest)
        with contextlib.suppress(HashMismatch, UnknownBlob):  # damaged since it was stored: store it again
            if digest in self._sizes and await self.claim(digest, owner=owner):
                return True
        with self.partial(digest, size_bytes) as partial:
            async for piece in pieces:
                await partial.write(piece)
            if size_bytes and not partial.written_bytes:
                raise HashMismatch(f"blob {digest} is not stored here and no bytes came; send its bytes", digest=digest)
            await partial.commit(owner=owner)
        return False

    def partial(self, digest: str, size_bytes: int) -> PartialBlob:
        """Create a blob that is written piece by piece. Reserves its size; raises `DiskFull`."""
        check_digest(digest)
        if size_bytes < 0:
            raise field_error("size_bytes", "be >= 0", size_bytes)
        self._check_quota(size_bytes)
        path = self.directory / f"{digest}.{next(self._partial_numbers)}{PARTIAL_SUFFIX}"
        return PartialBlob(self, path, digest, size_bytes)

    async def adopt(self, file: Path, digest: str, *, owner: str) -> bool:
        """Add a file of this host without a copy, if it has these bytes and the file system allows a link.

        Return False if it does not exist, is on another file system, or has another hash.
        """
        link = self.directory / f"{digest}.{next(self._partial_numbers)}{PARTIAL_SUFFIX}"
        try:
            os.link(file, link)
        except OSError:  # removed, not readable or not linkable; the network remains
            return False
        try:
            size = os.stat(link).st_size
            self._check_quota(size)
            if await run_sized(size, lambda: sha256_of_file(link), inline_max=LINKED_BYTES) != digest:
                return False
            self._publish(link, digest, owner)
            return True
        finally:
            # Also if the caller is cancelled, and after a rename onto another link to the file, which keeps both names.
            link.unlink(missing_ok=True)

    def release(self, owner: str) -> int:
        """Remove an owner and delete blobs without an owner. Return the freed bytes."""
        return sum(self._delete(digest) for digest in self._owners.drop(owner))

    def sweep(self, older_s: float) -> int:
        """Delete files that uploads on this host left in the directory when they were killed. Return the freed bytes.

        These are partial files of uploads, and whole blobs that were not claimed, if no process has written them for
        `older_s` seconds.
        """
        freed_bytes = 0
        for entry in list(os.scandir(self.directory)):
            unclaimed = len(entry.name) == 64 and entry.name not in self._sizes
            if unclaimed or (UPLOAD_MARK in entry.name and entry.name.endswith(PARTIAL_SUFFIX)):
                with suppress(FileNotFoundError):  # its upload has just ended
                    found = entry.stat()
                    if self._clock.wall_s() - found.st_mtime >= older_s:
                        os.unlink(entry.path)
                        freed_bytes += found.st_size
        return freed_bytes

    # Inside -----------------------------------------------------------------------------------------------------------

    def _publish(self, partial: Path, digest: str, owner: str) -> None:
        self._owners.add(owner, digest)  # before it is visible: see OwnerJournal
        partial.replace(self.directory / digest)
        self._sizes[digest] = (self.directory / digest).stat().st_size
        self._verified.add(digest)
        self._arrived(digest)

    def _arrived(self, digest: str) -> None:
        for arrived in self._arrivals.pop(digest, ()):
            arrived.set_result(None)

    async def _verify(self, path: Path, digest: str) -> None:
        if digest in self._verified:
            return
        try:
            found = await run_sized(self._sizes[digest], lambda: sha256_of_file(path), inline_max=LINKED_BYTES)
        except FileNotFoundError:
            self._sizes.pop(digest, None)
            raise UnknownBlob(
                f"blob {digest} has vanished from {path.parent}; upload it again", digest=digest
            ) from None
        if digest not in self._sizes:
            raise UnknownBlob(f"blob {digest} was released while it was hashed; upload it again", digest=digest)
        if found != digest:
            self._delete(digest)
            raise HashMismatch(f"blob {digest} hashed to {found} and was deleted; send it again", digest=digest)
        self._verified.add(digest)

    def _delete(self, digest: str) -> int:
        (self.directory / digest).unlink(missing_ok=True)
        self._verified.discard(digest)
        return self._sizes.pop(digest, 0)

    def _check_quota(self, size_bytes: int, *, after_deleting: Path | None = None) -> None:
        if self.used_bytes + size_bytes <= self._quota_bytes:
            return
        if after_deleting is not None:
            after_deleting.unlink(missing_ok=True)
        raise DiskFull(
            f"{self.directory}: {size_bytes} bytes more would exceed quota_bytes = {self._quota_bytes} "
            f"({self.used_bytes} used); keep fewer versions or raise quota_bytes",
            used_bytes=self.used_bytes,
            quota_bytes=self._quota_bytes,
        )

    def _take_lock(self) -> None:
        self._lock = (self.directory / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise ConfigError(
                f"{self.directory}: another process has this blob directory open; stop it or choose another directory"
            ) from None


class PartialBlob:
    """A blob being written. Leaving its context without `commit` deletes it. Not shared between tasks."""

    def __init__(self, store: BlobStore, path: Path, digest: str, size_bytes: int) -> None:
        self._store = store
        self._path = path
        self._digest = digest
        self.size_bytes = size_bytes
        self._hash = hashlib.sha256()
        self._num_resets = 0
        self._ended = False
        self._changed = asyncio.Event()
        """Set at the next change, and replaced then."""
        self.written_bytes = 0

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        self._store._reserved_bytes += self.size_bytes
        self._store._incoming.setdefault(self._digest, self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._store._reserved_bytes -= self.size_bytes
        with suppress(OSError):  # closing writes the buffer again, and a full disk rejects it again
            self._file.close()
        self._path.unlink(missing_ok=True)
        if self._store._incoming.get(self._digest) is self:
            del self._store._incoming[self._digest]
        self._ended = True
        self._notify()

    async def follow(self, offset: int, piece_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield whole pieces from `offset` when they are written, without the last one of the announced size. End with
        the writer.

        Raises `HashMismatch` after `reset`.
        """
        num_resets = self._num_resets
        with self._path.open("rb") as file:  # remains readable after a rename or a deletion
            file.seek(offset)
            while True:
                if self._num_resets != num_resets:
                    raise HashMismatch(
                        f"blob {self._digest}: what this source forwarded was wrong; fetch it from its beginning",
                        digest=self._digest,
                    )
                if self._ended:
                    return
                if offset + piece_bytes <= self.written_bytes and offset + piece_bytes < self.size_bytes:
                    offset += piece_bytes
                    yield await asyncio.to_thread(file.read, piece_bytes)
                else:
                    await self._changed.wait()

    @property
    def can_be_followed(self) -> bool:
        """Whether some bytes are there, and more will come. A blob that was made from a delta is there at once."""
        return 0 < self.written_bytes < self.size_bytes

    def too_long_with(self, num_bytes: int) -> bool:
        """Return whether so many more bytes exceed the announced size."""
        return self.written_bytes + num_bytes > self.size_bytes

    async def write(self, piece: bytes) -> None:
        """Append `piece`. Raises `InvalidInput` for more bytes than were announced, `DiskFull`."""
        if self.too_long_with(len(piece)):
            must = f"have {self.size_bytes} bytes in all, the announced size of blob {self._digest}"
            raise field_error("data", must, Phrase(f"at least {self.written_bytes + len(piece)}"))
        await run_sized(len(piece), lambda: self._write(piece))
        self.written_bytes += len(piece)
        if self.can_be_followed:
            self._store._arrived(self._digest)
        self._notify()

    def reset(self) -> None:
        """Begin again, because what was written is wrong."""
        self._file.seek(0)
        self._file.truncate()
        self._hash = hashlib.sha256()
        self.written_bytes = 0
        self._num_resets += 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def commit(self, *, owner: str) -> None:
        """Make the blob visible. Raises `HashMismatch` if it is short or has another hash, `DiskFull`."""
        found = self._hash.hexdigest()
        if found != self._digest:
            raise HashMismatch(
                f"{self.written_bytes} of {self.size_bytes} bytes hash to {found}, not to {self._digest}; "
                "nothing was stored; send it again",
                digest=self._digest,
            )
        if self._store.durable:
            with disk_full_errors(self._path.parent):
                await asyncio.to_thread(os.fsync, self._file.fileno())
        self._store._publish(self._path, self._digest, owner)

    def _write(self, piece: bytes) -> None:
        self._hash.update(piece)
        with disk_full_errors(self._path.parent):
            self._file.write(piece)
            self._file.flush()  # for readers that follow


async def run_sized(num_bytes: int, work: Callable[[], T], *, inline_max: int = SMALL_BYTES) -> T:
    """Return `work()`, which reads or writes `num_bytes` of a file: in a thread, or here if they are at most
    `inline_max`."""
    return work() if num_bytes <= inline_max else await asyncio.to_thread(work)
