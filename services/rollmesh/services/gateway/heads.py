"""Store the newest ledger head of each run in an append-only file, outside the storage of the ledger.

heads.jsonl has one line per commit that this gateway forwarded: {"run": "r", "head": {"position": 17, "hash": "..."}}.
The last line of a run is valid, because a head covers all records before it. An empty head means that the run was
deleted. Opening the file rewrites it with these last lines, so that it does not grow with restarts. A stored head
survives a killed process. It is on the disk a moment later, because a trainer would wait for the disk in each commit.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.store.private_files import private_folder, private_opener
from rollmesh.shared.store.whole_files import write_whole

NAME = "heads.jsonl"
_log = logging.getLogger(__name__)


class HeadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file."""

    run: str
    head: LedgerHead


class Heads:
    """The file in one folder, written by one gateway."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._syncing: asyncio.Task[None] | None = None
        self._unsynced = False

    def open(self) -> None:
        """Create the folder, and drop all but the last line of each run."""
        private_folder(self._path.parent)
        write_whole(self._path, b"".join(_encode(run, head) for run, head in read_heads(self._path).items()))

    async def close(self) -> None:
        """Wait until every head is on the disk."""
        if self._syncing is not None:
            await self._syncing

    def store(self, run: str, head: LedgerHead) -> None:
        """Append a head, and begin to write it to the disk. A full disk does not fail the commit, because the
        coordinator has recorded it."""
        try:
            with open(self._path, "ab", opener=private_opener) as file:
                file.write(_encode(run, head))
        except OSError as error:
            _log.warning("cannot store ledger head: head=%s run=%s file=%s cause=%s", head, run, self._path, error)
            return
        self._unsynced = True
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.create_task(self._sync_all(), name="sync heads")

    async def _sync_all(self) -> None:
        while self._unsynced:
            self._unsynced = False
            try:
                await asyncio.to_thread(_sync, self._path)
            except OSError as error:
                _log.warning("cannot write ledger heads to the disk: file=%s cause=%s", self._path, error)


def read_heads(path: Path) -> dict[str, LedgerHead]:
    """Return the newest head of each run in a gateway's file; empty without a file. Lines truncated by a crash are
    skipped."""
    found: dict[str, LedgerHead] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            entry = msgspec.json.decode(line, type=HeadEntry)
        except UNDECODABLE:
            continue
        found[entry.run] = entry.head
    return {run: head for run, head in found.items() if head.hash}


def _encode(run: str, head: LedgerHead) -> bytes:
    return msgspec.json.encode(HeadEntry(run=run, head=head)) + b"\n"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
