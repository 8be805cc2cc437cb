"""All attacks by family. A family is one module of `families/`; register a new one here."""

from __future__ import annotations

import platform

from .attack import Attack, Family
from .families import (
    bombs,
    egress,
    file_api,
    filesystem,
    interpreter,
    kernel,
    network,
    replies,
    sessions,
    sharing,
    timing,
    verdicts,
)

FAMILIES: tuple[Family, ...] = (
    filesystem.FAMILY,
    sessions.FAMILY,
    sharing.FAMILY,
    network.FAMILY,
    egress.FAMILY,
    kernel.PROC_FAMILY,
    kernel.PRIVILEGE_FAMILY,
    kernel.DOOR_FAMILY,
    bombs.PROCESS_FAMILY,
    bombs.MEMORY_FAMILY,
    bombs.DISK_FAMILY,
    file_api.FAMILY,
    interpreter.FAMILY,
    timing.FAMILY,
    replies.OUTPUT_FAMILY,
    replies.FRAME_FAMILY,
    verdicts.FAMILY,
)


def all_attacks() -> list[Attack]:
    """Families in the order of the table."""
    return [attack for family in FAMILIES for attack in family.attacks]


def playable(attack: Attack) -> bool:
    """Return whether an attack can run here: raw system calls contain the numbers of one architecture."""
    return "raw(" not in attack.source or platform.machine() == "x86_64"
