"""Word forms for messages."""

from __future__ import annotations


def count_of(num: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 blob", "2,000 blobs"."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {plural or noun + 's'}"
