"""Fair comparisons on a machine that is not quiet: contenders take turns (A B C A B C ...), and each repetition gives one ratio.

Whatever slows the machine for a while then slows all of them. CPU seconds of this process stand beside wall seconds: they leave
out the time in which others had the core, though not what others do to its caches and clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Contender(Protocol):
    """One way of doing the same work."""

    def __call__(self, repetition: int) -> int:
        """Does the work once and says how many units it made. Set-up that a long run pays once is not part of it."""
        ...


@dataclass(frozen=True, slots=True)
class Lap:
    """One contender, one repetition."""

    units: int
    wall_s: float
    cpu_s: float

    @property
    def per_wall_s(self) -> float:
        return self.units / self.wall_s

    @property
    def per_cpu_s(self) -> float:
        return self.units / self.cpu_s


def lap(work: Contender, repetition: int) -> Lap:
    wall, cpu = time.perf_counter(), time.process_time()
    units = work(repetition)
    return Lap(units, time.perf_counter() - wall, time.process_time() - cpu)


def interleave(contenders: Mapping[str, Contender], repetitions: int) -> dict[str, list[Lap]]:
    """`repetitions` laps each after one that does not count; laps of one index ran right after each other."""
    laps: dict[str, list[Lap]] = {name: [] for name in contenders}
    for repetition in range(-1, repetitions):
        for name, work in contenders.items():
            one = lap(work, repetition)
            if repetition >= 0:
                laps[name].append(one)
    return laps


def ratios(ours: Sequence[Lap], theirs: Sequence[Lap]) -> tuple[list[float], list[float]]:
    """Ours over theirs per repetition: units per wall second, units per CPU second."""
    pairs = list(zip(ours, theirs, strict=True))
    return [a.per_wall_s / b.per_wall_s for a, b in pairs], [a.per_cpu_s / b.per_cpu_s for a, b in pairs]
