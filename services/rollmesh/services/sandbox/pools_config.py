"""Configuration of what a node keeps ready ahead of demand."""

from __future__ import annotations

import msgspec


class PoolsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sessions made before they are asked for, and for how long zygotes wait for the next one."""

    ready_max: int = 8
    """Ready sessions of a node, all profiles together; 0 keeps none. How many there are follows demand. Each takes a place that no live
    session wants, and a few MB. Profiles with egress have none: a session's way out is its own from its fork on."""
    making_max: int = 2
    """Ready sessions in the making at a time: more fill a pool sooner and take more of the cores from live sessions meanwhile. Of several
    turns to start (`starts_inflight_max`) one is left to the sessions that are asked for."""
    by_profile: dict[str, int] = {}
    """At most so many of a profile; those not named share `ready_max`. 0 keeps none of it."""
    halflife_s: float = 60.0
    """After so long without another, a burst of opens counts half: longer keeps sessions ready over longer pauses between bursts."""
    zygote_idle_s: float = 600.0
    """A zygote without sessions ends when its profile was not opened for so long, which frees its memory (tens of MB with large
    preloads); the next open starts another, about 0.1 s. 0 keeps all. Those that `warm` names stay."""

    def __post_init__(self) -> None:
        if self.halflife_s <= 0:
            raise ValueError(f"halflife_s must be positive, got {self.halflife_s}")
        if self.making_max < 1:
            raise ValueError(f"making_max must be at least 1, got {self.making_max}; ready_max=0 keeps none")
        numbers = {"ready_max": self.ready_max, "zygote_idle_s": self.zygote_idle_s}
        numbers |= {f"by_profile.{name}": num for name, num in self.by_profile.items()}
        for name, value in numbers.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
