"""Snapshot, fork and restore of sessions: leases on one side, snapshots on the other.

A fork is a session of its own from the beginning: own jail, place, lease, quota. A restore replaces the jail under a lease: the old
one is gone before the new one is made, so a session never has two, and if the new one can't be made the session is lost.
"""

from __future__ import annotations

from contextlib import aclosing

from rollmesh.services.sandbox.engine import SandboxEngine
from rollmesh.services.sandbox.sessions import Holder, Sessions
from rollmesh.services.sandbox.snapshots import SessionSnapshot, Snapshots
from rollmesh.shared.errors import InvalidInput


class Branches:
    """What the verbs about snapshots do."""

    def __init__(self, engine: SandboxEngine, sessions: Sessions, snapshots: Snapshots) -> None:
        self._engine = engine
        self._sessions = sessions
        self._snapshots = snapshots

    async def snapshot(self, session_id: str, *, ttl_s: float) -> SessionSnapshot:
        """Save a session, which goes on. Raises UnknownSession, Overloaded, InvalidInput, SandboxFailed."""
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
        """A new session like the saved one, of the same tenant. Raises UnknownSnapshot, and as `Sessions.open`."""
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
        """Put a session back. Raises UnknownSnapshot and InvalidInput before anything is done; afterwards what `open` raises."""
        with self._snapshots.using(snapshot_id) as snapshot:
            async with self._sessions.using(session_id) as lease:
                if snapshot.profile != lease.profile:
                    raise InvalidInput(
                        f"snapshot {snapshot_id!r} is of profile {snapshot.profile!r}, the session of {lease.profile!r}"
                    )
                with self._sessions.replacing(session_id):
                    await self._engine.end(session_id)
                    async with aclosing(snapshot.pieces()) as pieces:
                        await self._engine.open(session_id, lease.profile, lease.limits, pieces, tenant=lease.tenant)

    async def drop(self, snapshot_id: str) -> None:
        """Forget a snapshot."""
        await self._snapshots.drop(snapshot_id)
