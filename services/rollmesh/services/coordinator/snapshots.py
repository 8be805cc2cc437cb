"""Snapshots of a run's state. They shorten recovery and are never required for it.

A file has the state after one ledger record, the position and hash of that record, and a digest of all of it. It gets
its name only when it is complete. A snapshot that is damaged, of another ledger or of another version of the code is
skipped with a warning, because an older one, or the whole ledger, gives the same state.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from rollmesh.services.coordinator.core.state import State
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.store.private_files import private_folder
from rollmesh.shared.store.whole_files import write_whole

KEPT = 2
"""Number of snapshots that are kept per run: the newest, and one as a fallback."""
_SUFFIX = ".snapshot"
_DIGEST_BYTES = 32
FORMAT = 6
"""Format of the files. It rises with every change of `State` or of what the fold keeps in it, because an older release
would drop new fields, and this one would fill them with defaults. A test compares it with the fields of `State`."""

_log = logging.getLogger(__name__)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run after the ledger record at `head`."""

    format: int = FORMAT
    """Files before this field have format 1."""
    head: LedgerHead
    state: State


class _SnapshotFormat(msgspec.Struct):
    """The part of a file that every release reads."""

    format: int = 1


def encode_state(state: State) -> bytes:
    """Return the canonical bytes of a state: equal states have equal bytes."""
    return msgspec.msgpack.encode(state)


class SnapshotStore:
    """The snapshots of one run in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, body: bytes, position: int) -> None:
        """Store an encoded Snapshot durably, and remove all but the newest `KEPT`."""
        private_folder(self._folder)
        path = self._folder / f"{position:020d}{_SUFFIX}"
        write_whole(path, hashlib.sha256(body).digest() + body)
        for old in self._files()[KEPT:]:
            old.unlink(missing_ok=True)

    def load(self) -> list[Snapshot]:
        """Return all readable snapshots, newest first. Damaged ones are skipped with a warning."""
        found = []
        for path in self._files():
            try:
                found.append(_read(path))
            except (OSError, ValueError) as error:
                _log.warning("snapshot skipped, an older one or the whole ledger is used: file=%s: %s", path, error)
        return found

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"), reverse=True)


def encode_snapshot(state: State, head: LedgerHead) -> bytes:
    """Return the content of a snapshot file without its digest."""
    return msgspec.msgpack.encode(Snapshot(head=head, state=state))


def _read(path: Path) -> Snapshot:
    content = path.read_bytes()
    digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("its digest does not match")
    found = msgspec.msgpack.decode(body, type=_SnapshotFormat).format
    if found != FORMAT:
        raise ValueError(f"it has format {found}, and this release uses {FORMAT}")
    return msgspec.msgpack.decode(body, type=Snapshot)
