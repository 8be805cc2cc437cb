"""The head of a ledger: the position and the hash of one record, which together cover every record up to it.

    hash_n = SHA-256(stored bytes of record n), and these bytes contain hash_{n-1} (LedgerRecord.previous)

A client that stores a head outside the ledger can check later that the ledger still contains it. If a record at or
before that position was removed, inserted, moved or changed, the hash differs.
"""

from __future__ import annotations

import hashlib
import re
from typing import Self

import msgspec

from rollmesh.shared.errors import field_error

RECORD_FORMAT = 2
"""Newest format of a ledger record that this release reads (LedgerRecord.format). It writes 2 for a record with
ArchiveSealed, and none, which is 1, for all others."""
CHECKSUM = "Sha256"
"""Header with the hash of a record's bytes. It also detects an altered byte in the newest record, which has no
successor yet."""
_TEXT = re.compile(r"([1-9][0-9]{0,18}):([0-9a-f]{64})")


class LedgerHead(msgspec.Struct, frozen=True, kw_only=True):
    """The record at `position` and its hash."""

    position: int = 0
    """Sequence of the record in the ledger's stream; 0 before the first."""
    hash: str = ""
    """SHA-256 of the record's stored bytes, lower-case hex; empty before the first, or if only the position is
    known."""

    def __str__(self) -> str:
        return f"{self.position}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the head in "POSITION:HASH". Raises InvalidInput for any other text."""
        if (match := _TEXT.fullmatch(text)) is None:
            must = "be POSITION:HASH, a positive number and 64 lower-case hex digits"
            remedy = "copy it from a CommitUpdate response, a checkpoint's rollmesh.json or a gateway's heads.jsonl"
            raise field_error("head", must, text, remedy)
        return cls(position=int(match[1]), hash=match[2])


EMPTY = LedgerHead()
"""The head of a ledger without records."""


def record_hash(payload: bytes) -> str:
    """Return the hash of a ledger record from its stored bytes."""
    return hashlib.sha256(payload).hexdigest()
