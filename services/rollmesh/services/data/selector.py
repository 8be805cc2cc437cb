"""The selector port: which task answers the next draw.

A selector is deterministic: the same configuration, the same observed facts in the same order and the same draw index give
the same task. It never counts its own draws; what has been drawn is known from the ledger alone. Selectors are found by
name, or loaded from a user's file as `file.py:Name`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from rollmesh.shared.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What a group showed about its task.

    `successes` and `failures` are sums over the scored members of p and 1 - p, p in [0, 1]; infra failures are in neither.
    Both are 0 for a group that ended without a score.
    """

    position: int
    successes: float
    failures: float


class Selector(Protocol):
    """Chooses tasks of one pool for one policy.

    A class that implements it is constructed as `cls(pool=..., seed=..., options=...)`, where `options` is an instance of
    its class attribute `Options` (a msgspec struct, converted strictly from the configuration), or without `options` if it
    has no such attribute.
    """

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        """Position in the pool for draw `index` (0-based). `in_flight`: positions drawn whose result is still to come."""

    def observe(self, result: GroupResult) -> None:
        """Folds one group's result into the state."""

    def snapshot(self) -> bytes:
        """The state, such that `restore` of it continues with the same draws."""

    def restore(self, state: bytes) -> None:
        """Replaces the state. CorruptSnapshot if `state` is not one of this selector and pool."""


SELECTORS = Registry(
    "selector",
    {
        "uniform": "rollmesh.services.data.selectors.uniform:UniformSelector",
        "thompson": "rollmesh.services.data.selectors.thompson:ThompsonSelector",
    },
)
