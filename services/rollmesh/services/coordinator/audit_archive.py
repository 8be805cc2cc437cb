"""Compare the archive segments of a ledger with what it recorded about them.

The chain shows whether the records of a segment are those of the ledger. The digest of the file also shows that it was
replaced by another one with the same records, and that a segment is missing whose records are elsewhere.
"""

from __future__ import annotations

from rollmesh.services.coordinator.audit_report import Complain
from rollmesh.services.coordinator.core import facts as f
from rollmesh.shared.bus.archive_files import ArchiveFiles, file_sha256


class SealedSegments:
    """The segments that the ledger names. `complain` receives violations."""

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self._facts: list[tuple[int, f.ArchiveSealed]] = []
        """Each with the position of its record."""

    def enter(self, fact: f.Fact, position: int) -> None:
        """Fold one fact of the record at `position`."""
        if isinstance(fact, f.ArchiveSealed):
            self._facts.append((position, fact))

    def compare(self, files: ArchiveFiles) -> None:
        """Compare every file with its fact. Blocks for as long as the disk does."""
        there = {(segment.number, segment.digest): segment for segment in files.segments()}
        for position, fact in self._facts:
            what = f"archive segment {fact.number} of records {fact.first} to {fact.last}"
            segment = there.get((fact.number, fact.sha256[:16]))
            if segment is None:
                self._complain("chain", f"{what} is missing in {files.folder}", position)
                continue
            try:
                found = file_sha256(segment.path)
            except OSError as error:
                self._complain("chain", f"{what} cannot be read: {segment.path}: {error.strerror}", position)
                continue
            if found != fact.sha256:
                self._complain(
                    "chain",
                    f"{what} was altered: {segment.path} has the SHA-256 {found}, sealed {fact.sha256}",
                    position,
                )
