"""Which versions the depot keeps: the newest of each run's policy. A version is the owner of its blobs; dropping it deletes them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

_OWNER = re.compile(r"weights:(?P<policy>.+)@(?P<step>\d+)\.(?P<incarnation>\d+)")


def outdated(owners: Iterable[str], *, versions_max: int) -> list[str]:
    """Owners beyond the newest `versions_max` of their run's policy; owners that are no version are never among them.

    A newer incarnation is newer than any step of an older one: after a roll-back the older steps are void.
    """
    by_policy: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for owner in owners:
        if match := _OWNER.fullmatch(owner):
            by_policy[match["policy"]].append((int(match["incarnation"]), int(match["step"]), owner))
    return [owner for versions in by_policy.values() for *_, owner in sorted(versions)[:-versions_max]]
