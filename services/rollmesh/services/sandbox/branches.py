"""Snapshot, fork and restore sessions: connects leases and snapshots.

A fork is a separate session with its own jail, slot, lease and quota. A restore replaces the jail under a lease. It
ends the old jail before it creates the new one, so a session never has two. If the new jail cannot be created, the
session is lost.
"""

from __future__ import annotations

from contextlib import aclosing

from rollmesh.services.sandbox.engine import SandboxEngine
from rollmesh.services.sandbox.sessions import Holder, Sessions
from rollmesh.services.sandbox.snapshots import SessionSnapshot, Snapshots
from rollmesh.shared.errors import Phrase, field_error


class Branches:
    """Implements the snapshot commands of the service."""

    def __init__(self, engine: SandboxEngine, sessions: Sessions, snapshots: Snapshots) -> None:
        self._engine = engine
        self._sessions = sessions
        self._snapshots = snapshots

    async def snapshot(self, session_id: str, *, ttl_s: float) -> SessionSnapshot:
        """Save a session, which continues to run. Raises UnknownSession, Overloaded, SessionNotSaved, SandboxFailed."""
        async with self._sessions.using(session_id) as lease:
            return await self._snapshots.take(
                self._engine,
                session_id,
                profile=lease.profile,
                limits=lease.limits,
                tenant=lease.tenant,
                ttl_s=ttl_s,
            )

    async def fork(
        self, session_id: str, snapshot_id: str, *, ttl_s: float, owner: str, holder: Holder | None = None
    ) -> None:
        """Open a new session from a snapshot, for the same tenant. Raises UnknownSnapshot and the errors of
        `Sessions.open`."""
        with self._snapshots.using(snapshot_id) as snapshot:
            async with aclosing(snapshot.pieces()) as pieces:
                await self._sessions.open(
                    session_id,
                    profile=snapshot.profile,
                    limits=snapshot.limits.as_dict(),
                    ttl_s=ttl_s,
                    owner=owner,
                    tenant=snapshot.tenant,
                    holder=holder,
                    snapshot=pieces,
                )

    async def restore(self, session_id: str, snapshot_id: str) -> None:
        """Restore a session to a snapshot. Raises UnknownSnapshot and InvalidInput before any change, and afterwards
        the errors of `Sessions.open`."""
        with self._snapshots.using(snapshot_id) as snapshot:
            async with self._sessions.using(session_id) as lease:
                if snapshot.profile != lease.profile:
                    must = f"name a snapshot of profile {lease.profile!r}, which the session has"
                    got = Phrase(f"{snapshot_id!r} of profile {snapshot.profile!r}")
                    raise field_error("snapshot_id", must, got)
                with self._sessions.replacing(session_id):
                    await self._engine.end(session_id)
                    async with aclosing(snapshot.pieces()) as pieces:
                        await self._engine.open(session_id, lease.profile, lease.limits, pieces, tenant=lease.tenant)

    async def drop(self, snapshot_id: str) -> None:
        """Drop a snapshot."""
        await self._snapshots.drop(snapshot_id)
