"""The owners of each blob, stored in a journal beside the blobs.

The journal is a JSON line per change, compacted when it is opened. A line is written before its blob becomes visible:
after a crash there may be an owned blob that is missing, which an upload notices, but never a stored blob whose owner
was forgotten.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO


class OwnerJournal:
    """Maps owners to digests. Blocking, with writes of about a hundred bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owned: dict[str, set[str]] = {}
        self._owners: dict[str, set[str]] = {}
        self._file: TextIO | None = None

    def open(self) -> None:
        """Reads and compacts the journal. A torn last line, from a crash while writing it, is dropped."""
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                self._replay(line)
        compact = self._path.with_suffix(".new")
        with compact.open("w") as file:
            for owner, digests in self._owned.items():
                for digest in digests:
                    file.write(_line("add", owner, digest))
            file.flush()
            os.fsync(file.fileno())
        compact.replace(self._path)
        self._file = self._path.open("a")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, owner: str, digest: str) -> None:
        if digest not in self._owned.get(owner, ()):
            self._write(_line("add", owner, digest))
            self._add(owner, digest)

    def drop(self, owner: str) -> list[str]:
        """Remove an owner. Return the digests that have no owner now."""
        if owner not in self._owned:
            return []
        self._write(_line("drop", owner, ""))
        return self._drop(owner)

    def owners_of(self, digest: str) -> frozenset[str]:
        return frozenset(self._owners.get(digest, ()))

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(self._owned)

    def _replay(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            return
        if entry["verb"] == "add":
            self._add(entry["owner"], entry["digest"])
        else:
            self._drop(entry["owner"])

    def _write(self, line: str) -> None:
        assert self._file is not None, "the store is not open"
        self._file.write(line)
        self._file.flush()

    def _add(self, owner: str, digest: str) -> None:
        self._owned.setdefault(owner, set()).add(digest)
        self._owners.setdefault(digest, set()).add(owner)

    def _drop(self, owner: str) -> list[str]:
        orphans = []
        for digest in self._owned.pop(owner, ()):
            self._owners[digest].discard(owner)
            if not self._owners[digest]:
                del self._owners[digest]
                orphans.append(digest)
        return orphans


def _line(verb: str, owner: str, digest: str) -> str:
    return json.dumps({"verb": verb, "owner": owner, "digest": digest}) + "\n"
