"""The order of scorers: which reads the rewards of which.

    exact ----\\
               > consistency        `consistency` has `reads = ("correct", "format")`, the names of their rewards.
    format ---/

A scorer runs when those whose rewards it reads have returned. Scorers that do not read each other run at the same time.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from rollmesh.services.reward.scorer_run import ConfiguredScorer
from rollmesh.shared.errors import ConfigError, InvalidInput


class ScorerGraph:
    """The scorers of a service, each after those whose rewards it reads."""

    def __init__(self, scorers: Sequence[ConfiguredScorer]) -> None:
        """Raise ConfigError for a reward of two scorers, for a reward that is read but that no scorer gives, and for
        scorers that read each other."""
        self.scorers = tuple(scorers)
        self._giver = _givers(scorers)
        self.reads: Mapping[int, tuple[int, ...]] = {
            number: tuple(dict.fromkeys(self._read_by(scorer))) for number, scorer in enumerate(scorers)
        }
        """Number of a scorer -> numbers of those whose rewards it reads."""
        try:
            self.order = tuple(TopologicalSorter(self.reads).static_order())
        except CycleError as err:
            names = [self.scorers[number].name for number in err.args[1]]
            raise ConfigError(
                f"`reward.scorers`: the scorers of {' <- '.join(names)} read each other's rewards in a circle; remove "
                "one of the names in `reads`"
            ) from None

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The names of all rewards, in the order of the configuration."""
        return tuple(self._giver)

    def chosen(self, names: Collection[str], of_task: Collection[str]) -> tuple[int, ...]:
        """Return the numbers of the scorers that give the rewards `names`, and of those that they read for a task that
        names `of_task`, in the order in which they run. No names mean all scorers. Raise InvalidInput for an unknown
        name."""
        if not names:
            return self.order
        wanted: set[int] = set()
        waiting = [self._number(name) for name in names]
        while waiting:
            number = waiting.pop()
            if number not in wanted:
                wanted.add(number)
                waiting += self.read_for(number, of_task)
        return tuple(number for number in self.order if number in wanted)

    def read_for(self, number: int, of_task: Collection[str]) -> tuple[int, ...]:
        """Return the numbers of the scorers whose rewards a scorer reads, for a task that names `of_task`."""
        if not self.scorers[number].scorer.reads_of_task:
            return self.reads[number]
        named = {self._giver.get(name) for name in of_task}
        return tuple(read for read in self.reads[number] if read in named) or self.reads[number]

    def longest_s(self, seconds: Sequence[float]) -> float:
        """Return the longest time of a sample, if each scorer takes `seconds` [number of scorers]."""
        ends: dict[int, float] = {}
        for number in self.order:
            ends[number] = seconds[number] + max((ends[read] for read in self.reads[number]), default=0.0)
        return max(ends.values(), default=0.0)

    def _number(self, name: str) -> int:
        if name not in self._giver:
            raise InvalidInput(
                f"no scorer gives a reward called {name!r}{nearest(name, self._giver)}; known: "
                f"{', '.join(self._giver)}; name a reward of reward.scorers"
            )
        return self._giver[name]

    def _read_by(self, scorer: ConfiguredScorer) -> list[int]:
        for name in scorer.reads:
            if name not in self._giver:
                raise ConfigError(
                    f"the scorer of `{scorer.name}` ({scorer.label}) reads the reward `{name}`, which no scorer "
                    f"gives{nearest(name, self._giver)}; known: {', '.join(self._giver)}; add a scorer with "
                    f"`reward: {name}` to reward.scorers",
                    key="reward.scorers",
                )
        return [self._giver[name] for name in scorer.reads]


def _givers(scorers: Sequence[ConfiguredScorer]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, scorer in enumerate(scorers):
        for name in scorer.reward_names:
            if name in found:
                raise ConfigError(
                    f"`reward.scorers`: two scorers give a reward called `{name}`: {scorers[found[name]].label} and "
                    f"{scorer.label}; set another `reward` in one of the entries",
                    key="reward.scorers",
                )
            found[name] = number
    return found


def nearest(name: str, known: Collection[str]) -> str:
    """Return the question whether the most similar known name is meant, in brackets, or ""."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
