"""Fair comparisons on a busy machine: contenders take turns (A B C A B C ...), and each repetition gives one ratio.

A temporary load then slows all of them. CPU seconds of this process are reported beside wall seconds: they exclude the
time in which other processes had the core, but not their effect on its caches and clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Contender(Protocol):
    """One implementation of the same work."""

    def __call__(self, repetition: int) -> int:
        """Do the work once and return the number of units. Setup that a long run pays once is excluded."""
        ...


@dataclass(frozen=True, slots=True)
class Lap:
    """The measurement of one contender in one repetition."""

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
    """Run `repetitions` laps of each after an uncounted one. Laps with the same index run right after each other."""
    laps: dict[str, list[Lap]] = {name: [] for name in contenders}
    for repetition in range(-1, repetitions):
        for name, work in contenders.items():
            one = lap(work, repetition)
            if repetition >= 0:
                laps[name].append(one)
    return laps


def ratios(ours: Sequence[Lap], theirs: Sequence[Lap]) -> tuple[list[float], list[float]]:
    """Return ours over theirs per repetition: units per wall second, units per CPU second."""
    pairs = list(zip(ours, theirs, strict=True))
    return [a.per_wall_s / b.per_wall_s for a, b in pairs], [a.per_cpu_s / b.per_cpu_s for a, b in pairs]
