"""The trainer's list of the samples that its weights were trained on: one JSON line per update, `trained.jsonl`.

Each checkpoint contains the whole list of *its* weights. So `audit --checkpoint DIR` can compare it with the ledger
without other files, and a return to an older checkpoint also returns to its list. Only lines since the last checkpoint
are in memory; older lines are copied from file to file.

Line: {"update": k, "incarnation": i, "outcome": "APPLIED", "digest": "...", "sample_ids": [...]}.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.digest import INITIAL_DIGEST, next_digest


class TrainedUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One update in the history of some weights. `digest` is the commit digest after it."""

    update: int
    incarnation: int
    outcome: str
    digest: str
    sample_ids: list[str]


class TrainedLog:
    """Appends updates and maintains the digest chain. `base` is the list of the checkpoint from which it continues."""

    def __init__(self, base: Path | None = None, *, update: int = 0, digest: str = INITIAL_DIGEST) -> None:
        self.update = update
        self.digest = digest
        self._base = base
        self._tail: list[TrainedUpdate] = []

    def append(self, update: int, sample_ids: Sequence[str], *, incarnation: int, outcome: str) -> str:
        """Record update `update`, which must follow the last one. Return the digest after it."""
        if update != self.update + 1:
            raise ValueError(f"update {update} does not follow update {self.update} in the list of trained samples")
        digest = next_digest(self.digest, update, sample_ids)
        line = TrainedUpdate(
            update=update, incarnation=incarnation, outcome=outcome, digest=digest, sample_ids=sorted(sample_ids)
        )
        self._tail.append(line)
        self.update, self.digest = update, digest
        return digest

    def write_to(self, path: Path) -> None:
        """Write the whole list to a new file."""
        if self._base is not None:
            shutil.copyfile(self._base, path)
        with path.open("ab") as file:
            for line in self._tail:
                file.write(msgspec.json.encode(line) + b"\n")

    def copy(self) -> TrainedLog:
        """Return a list that later updates of this one do not change."""
        copied = TrainedLog(self._base, update=self.update, digest=self.digest)
        copied._tail = list(self._tail)
        return copied

    def rebase(self, path: Path, update: int | None = None) -> None:
        """Continue from a list that `write_to` wrote, at its final path. It ends with `update`; by default, with the
        last one."""
        self._base = path
        self._tail = [line for line in self._tail if update is not None and line.update > update]


def read_trained(path: Path) -> Iterator[TrainedUpdate]:
    """Yield the updates of a list in order, as `read_lines`."""
    with path.open("rb") as file:
        yield from read_lines(file)


def read_lines(file: BinaryIO) -> Iterator[TrainedUpdate]:
    """Yield the updates of an open list in order, and verify the digest chain.

    Raises ValueError naming file and line if a line is malformed, out of order, or breaks the chain.
    """
    update, digest = 0, INITIAL_DIGEST
    for number, raw in enumerate(file, start=1):
        try:
            line = msgspec.json.decode(raw, type=TrainedUpdate)
        except UNDECODABLE as error:
            raise ValueError(f"{file.name}:{number}: {error}") from error
        if line.update != update + 1 or line.digest != next_digest(digest, line.update, line.sample_ids):
            raise ValueError(f"{file.name}:{number}: update {line.update} does not continue the chain after {update}")
        update, digest = line.update, line.digest
        yield line
