"""One rule for the formats of stored files: every format has a number, older numbers are read, and newer ones are
rejected.

A format keeps its number while this release and the one before it read each other's files. docs/upgrades.md lists the
formats.
"""

from __future__ import annotations

from rollmesh.shared.errors import FailedPrecondition


class NewerFormat(FailedPrecondition):
    """A later release wrote the file, and this one does not know its format. The file is intact."""

    reason = "NEWER_FORMAT"


def check_format(what: str, found: int, newest: int) -> None:
    """Raise NewerFormat if `found` is above `newest`, the newest format that this release reads. `what` names the file
    or record."""
    if found > newest:
        raise newer_format(f"{what} has format {found}, and this release reads formats up to {newest}")


def newer_format(what: str) -> NewerFormat:
    """Return the error, with the remedy, for something that only a later release can have written."""
    return NewerFormat(f"{what}: a later release of rollmesh wrote it; use that release or a later one")
