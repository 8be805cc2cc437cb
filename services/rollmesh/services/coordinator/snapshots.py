"""Snapshots of a run's state: they bound recovery and are never needed for it.

A file holds the state after one ledger record, that record's position and hash, and a digest of all of it; it appears under its name only
when it is complete. A snapshot that is damaged, of another ledger or of another version of the code is passed by with a warning: an
older one, or the whole ledger, gives the same state.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from rollmesh.services.coordinator.core.state import State
from rollmesh.shared.ledger_head import LedgerHead

KEPT = 2
"""Snapshots kept per run: the newest, and one to fall back to."""
_SUFFIX = ".snapshot"
_DIGEST_BYTES = 32

_log = logging.getLogger(__name__)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run after the ledger record at `head`."""

    head: LedgerHead
    state: State


def encode_state(state: State) -> bytes:
    """Canonical bytes of a state: equal states, equal bytes."""
    return msgspec.msgpack.encode(state)


class SnapshotStore:
    """The snapshots of one run in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, body: bytes, position: int) -> None:
        """Store an encoded Snapshot durably, and drop all but the newest `KEPT`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{position:020d}{_SUFFIX}"
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        for old in self._files()[KEPT:]:
            old.unlink(missing_ok=True)

    def load(self) -> list[Snapshot]:
        """All readable snapshots, newest first. Damaged ones are passed by with a warning."""
        found = []
        for path in self._files():
            try:
                found.append(_read(path))
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                _log.warning("snapshot %s is passed by: %s; an older one or the whole ledger serves", path, error)
        return found

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"), reverse=True)


def encode_snapshot(state: State, head: LedgerHead) -> bytes:
    """The body of a snapshot file."""
    return msgspec.msgpack.encode(Snapshot(head=head, state=state))


def _read(path: Path) -> Snapshot:
    content = path.read_bytes()
    digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("its digest does not match")
    return msgspec.msgpack.decode(body, type=Snapshot)
