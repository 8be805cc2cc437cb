"""The newest ledger head of each run, in an append-only file: a copy that the ledger's own storage cannot change.

heads.jsonl holds one line per commit that this gateway forwarded: {"run": "r", "head": {"position": 17, "hash": "..."}}. The last line of a
run counts, since a head covers all records before it; an empty head says that the run was deleted. Opening the file rewrites it with these last lines, so that it does not grow with
restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from rollmesh.shared.ledger_head import LedgerHead

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
        self._writing = asyncio.Lock()

    def open(self) -> None:
        """Create the folder, and drop all but the last line of each run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(b"".join(_encode(run, head) for run, head in read_heads(self._path).items()))
        _sync(partial)
        partial.replace(self._path)

    async def store(self, run: str, head: LedgerHead) -> None:
        """Append a head durably. A full disk does not fail the commit that it belongs to: the commit has happened."""
        async with self._writing:
            try:
                await asyncio.to_thread(self._append, _encode(run, head))
            except OSError as error:
                _log.warning("ledger head %s of run %s was not stored in %s: %s", head, run, self._path, error)

    def _append(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def read_heads(path: Path) -> dict[str, LedgerHead]:
    """The newest head of each run in a gateway's file; empty without a file. Lines that a crash cut short are skipped."""
    found: dict[str, LedgerHead] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            entry = msgspec.json.decode(line, type=HeadEntry)
        except msgspec.DecodeError:
            continue
        found[entry.run] = entry.head
    return {run: head for run, head in found.items() if head.hash}


def _encode(run: str, head: LedgerHead) -> bytes:
    return msgspec.json.encode(HeadEntry(run=run, head=head)) + b"\n"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
