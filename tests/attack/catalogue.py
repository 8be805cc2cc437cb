"""All attacks, by family. A family is one file of `families/`; a new one is listed here."""

from __future__ import annotations

import platform

from .attack import Attack, Family
from .families import filesystem, network, sessions

FAMILIES: tuple[Family, ...] = (
    filesystem.FAMILY,
    sessions.FAMILY,
    network.FAMILY,
)


def all_attacks() -> list[Attack]:
    """In the order of the table."""
    return [attack for family in FAMILIES for attack in family.attacks]


def playable(attack: Attack) -> bool:
    """Whether it can be played here: raw system calls carry the numbers of one architecture."""
    return "raw(" not in attack.source or platform.machine() == "x86_64"
