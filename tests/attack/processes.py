"""Find the descendants of a process. An orphan stays below its session's pid 1, so no process of a session is
missed."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path


def descendants(pid: int) -> frozenset[int]:
    """Return all processes below `pid`, including zombies."""
    children = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(entry)) is not None:
            children[parent].append(int(entry))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        found += (below := children[waiting.pop()])
        waiting += below
    return frozenset(found)


def _parent(entry: str) -> int | None:
    try:
        return int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None
