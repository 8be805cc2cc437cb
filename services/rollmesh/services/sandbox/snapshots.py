"""Snapshots of a node: opaque bytes of one jail for another, stored as files in the state directory, under quotas.

The bytes are hostile. The service never parses or unpickles them. It counts and hashes them on arrival, writes them to
a file that only its user can read, and returns them unchanged. A snapshot exists from `take` until it is dropped,
expires unused, or the node ends. After a crash the next start deletes all snapshots. Space for the largest possible
snapshot is reserved first, so that two concurrent snapshots cannot exceed a quota together.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.config import SnapshotsConfig
from rollmesh.services.sandbox.engine import SandboxEngine, SnapshotTooLarge
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.errors import Overloaded, SandboxFailed, SessionNotSaved, UnknownSnapshot, field_error

_PIECE_BYTES = 1 << 20
_RETRY_AFTER_S = 5.0


@dataclass(slots=True, kw_only=True)
class SessionSnapshot:
    """One saved session."""

    snapshot_id: str
    path: Path
    profile: str
    limits: Limits
    tenant: str
    ttl_s: float
    expires_s: float
    num_bytes: int
    """Size of the complete snapshot; until then the reserved bytes."""
    sha256: str = ""
    """SHA-256 of the bytes; empty until they are complete."""
    lost: tuple[str, ...] = ()
    in_use: int = 0

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the bytes. Raises SandboxFailed before the last piece if they differ from what was written."""
        file = await asyncio.to_thread(self._open)
        try:
            digest = hashlib.sha256()
            left = self.num_bytes
            while left:
                piece = await asyncio.to_thread(_read_hashed, file, min(_PIECE_BYTES, left), digest)
                left -= len(piece)
                if not piece or (not left and digest.hexdigest() != self.sha256):
                    raise SandboxFailed(f"snapshot {self.snapshot_id!r} was changed on disk; take another")
                yield piece
        finally:
            file.close()

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise SandboxFailed(f"snapshot {self.snapshot_id!r} cannot be read: {error}") from error


class Snapshots:
    """All snapshots of one node. `directory` contains nothing else."""

    def __init__(self, directory: Path, config: SnapshotsConfig, *, clock: Clock, ids: IdSource) -> None:
        self._directory = directory
        self._config = config
        self._clock = clock
        self._ids = ids
        self._kept: dict[str, SessionSnapshot] = {}

    @property
    def num_kept(self) -> int:
        """Number of snapshots, complete or being taken."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of all snapshots, including reserved bytes."""
        return sum(kept.num_bytes for kept in self._kept.values())

    async def start(self) -> None:
        """Delete the snapshots of a previous process."""
        await asyncio.to_thread(self._clear)

    async def close(self) -> None:
        """Delete all snapshots."""
        self._kept.clear()
        await asyncio.to_thread(self._clear)

    async def take(
        self, engine: SandboxEngine, session_id: str, *, profile: str, limits: Limits, tenant: str, ttl_s: float
    ) -> SessionSnapshot:
        """Save a session. Raises Overloaded beyond a quota, InvalidInput, and the errors of the engine."""
        snapshot = self._reserve(profile, limits, tenant, ttl_s)
        try:
            await self._write(engine, session_id, snapshot)
        except BaseException as error:
            await asyncio.shield(self.drop(snapshot.snapshot_id))
            if isinstance(error, SnapshotTooLarge):
                raise self._too_large(snapshot) from error
            raise
        return snapshot

    @contextmanager
    def using(self, snapshot_id: str) -> Iterator[SessionSnapshot]:
        """Use a complete snapshot: it does not expire meanwhile, and its time to live restarts afterwards. Raises
        UnknownSnapshot."""
        snapshot = self._kept.get(snapshot_id)
        if snapshot is None or not snapshot.sha256:
            raise UnknownSnapshot(
                f"no snapshot {snapshot_id!r} on this node: it was dropped, expired, or was taken on another node"
            )
        snapshot.in_use += 1
        try:
            yield snapshot
        finally:
            snapshot.in_use -= 1
            snapshot.expires_s = self._clock.monotonic_s() + snapshot.ttl_s

    async def drop(self, snapshot_id: str) -> None:
        """Drop a snapshot; ignore an unknown one. A reader that has it open can finish."""
        if (snapshot := self._kept.pop(snapshot_id, None)) is not None:
            await asyncio.to_thread(snapshot.path.unlink, missing_ok=True)

    async def sweep(self) -> int:
        """Drop the expired snapshots. Return their number."""
        now_s = self._clock.monotonic_s()
        expired = [
            key for key, kept in self._kept.items() if kept.sha256 and not kept.in_use and kept.expires_s <= now_s
        ]
        for snapshot_id in expired:
            await self.drop(snapshot_id)
        return len(expired)

    async def reap(self, every_s: float) -> None:
        """Sweep until cancelled."""
        while True:
            await self._clock.sleep(every_s)
            await self.sweep()

    def _reserve(self, profile: str, limits: Limits, tenant: str, ttl_s: float) -> SessionSnapshot:
        config = self._config
        if not 0 <= ttl_s <= config.ttl_s_max:
            raise field_error("ttl_s", f"be in [0, {config.ttl_s_max:g}]", ttl_s)
        theirs = [kept for kept in self._kept.values() if kept.tenant == tenant]
        if len(self._kept) >= config.snapshots_max or len(theirs) >= config.tenant_snapshots_max:
            raise self._overloaded("number")
        tenant_bytes = sum(kept.num_bytes for kept in theirs)
        room = min(config.snapshot_bytes_max, config.bytes_max - self.num_bytes, config.tenant_bytes_max - tenant_bytes)
        if room <= 0:
            raise self._overloaded("bytes")
        snapshot_id = self._ids.new("snapshot")
        snapshot = SessionSnapshot(
            snapshot_id=snapshot_id,
            path=self._directory / snapshot_id,
            profile=profile,
            limits=limits,
            tenant=tenant,
            ttl_s=ttl_s or config.ttl_s,
            expires_s=0.0,
            num_bytes=room,
        )
        self._kept[snapshot_id] = snapshot
        return snapshot

    async def _write(self, engine: SandboxEngine, session_id: str, snapshot: SessionSnapshot) -> None:
        file = await asyncio.to_thread(snapshot.path.open, "xb")
        digest, num_bytes = hashlib.sha256(), 0

        async def save(piece: bytes) -> None:
            nonlocal num_bytes
            num_bytes += len(piece)
            await asyncio.to_thread(_write_hashed, file, piece, digest)

        try:
            with file:
                lost = await engine.snapshot(session_id, snapshot.num_bytes, save)
        except OSError as error:
            raise SandboxFailed(f"cannot write the snapshot: {error}", session=session_id) from error
        assert num_bytes <= snapshot.num_bytes, "engines keep to bytes_max"
        snapshot.num_bytes, snapshot.lost = num_bytes, lost
        snapshot.expires_s = self._clock.monotonic_s() + snapshot.ttl_s
        snapshot.sha256 = digest.hexdigest()

    def _too_large(self, snapshot: SessionSnapshot) -> Overloaded | SessionNotSaved:
        most = self._config.snapshot_bytes_max
        if snapshot.num_bytes < most:
            return self._overloaded("bytes")
        return SessionNotSaved(
            f"the files and values of the session exceed sandbox.snapshots.snapshot_bytes_max ({most} bytes)"
        )

    def _overloaded(self, what: str) -> Overloaded:
        return Overloaded(
            f"the snapshot quota ({what}) of this node is exhausted; drop snapshots, or raise the limits in "
            "sandbox.snapshots",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _clear(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        os.makedirs(self._directory, mode=0o700)


def _read_hashed(file: BinaryIO, num_bytes: int, digest: hashlib._Hash) -> bytes:
    piece = file.read(num_bytes)
    digest.update(piece)
    return piece


def _write_hashed(file: BinaryIO, piece: bytes, digest: hashlib._Hash) -> None:
    file.write(piece)
    digest.update(piece)
