"""Priorities of the replay log by name: which trained samples are kept, and which are trained again first.

A priority is a pure function of what the ledger has of a group. `replay_log.py` keeps by it, `replay.py` chooses by it.
Priorities with `draws` give a share of every batch, and admission prepares the rest only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, log
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, SettingError, Settings


class Member(NamedTuple):
    """A scored member of a group."""

    sample_id: str
    reward: float
    """The success reward; 0 without it."""
    num_tokens: int
    """Number of tokens that the policy sampled."""
    used: bool
    """Whether an update used it."""


class Worth(NamedTuple):
    """What the order of the groups in the log depends on."""

    advantage: float
    """Mean absolute advantage, as the trainer reported it; else the mean absolute deviation of the success reward."""
    mean_return: float
    """Mean success reward of the kept samples."""
    age: int
    """Number of groups that were kept later."""


class Priority(Settings):
    """What is kept and what is chosen. The fields of a subclass are its options."""

    draws: ClassVar[bool] = False
    """Whether the replayed share of a batch is drawn from the log for every update."""
    replaces: ClassVar[bool] = False
    """Whether groups of the log replace groups of the batch whose members all have the same success reward."""
    by_task: ClassVar[bool] = False
    """Whether the log has one group per task, the newest."""
    once: ClassVar[bool] = False
    """Whether a kept sample leaves the log when it is chosen."""

    def kept(self, members: Sequence[Member], advantage: float) -> tuple[str, ...]:
        """Return the samples that the log keeps of a trained group; none to keep nothing of it."""
        return tuple(member.sample_id for member in members if member.used)

    def order(self, worth: Worth, uniform: float) -> float:
        """Return the rank of a group: larger ones are chosen first. `uniform` is its draw in (0, 1) for this update."""
        return uniform


def _check_whole(name: str, value: float) -> None:
    """Reject a fraction. Options are numbers on the wire, without a type for whole ones."""
    if not float(value).is_integer():
        raise SettingError(name, f"must be a whole number, got {value:g}")


class Fifo(Priority):
    """The newest groups, each equally probable (DOTS, S052: a share of every batch is of recent groups).

    First in, first out is the order in which groups leave a full log. The choice from the log is uniform.
    """

    draws: ClassVar[bool] = True
    advantage_min: NonNegativeFloat = 0.0
    """Least mean absolute advantage of a group that is kept. A small number above 0 keeps groups with non-zero variance
    only."""

    def kept(self, members: Sequence[Member], advantage: float) -> tuple[str, ...]:
        return super().kept(members, advantage) if advantage >= self.advantage_min else ()


class Advantage(Priority):
    """Groups with the largest mean absolute advantage first. They replace groups of the batch whose members all have
    the same success reward, which end as filtered (SSB, S065)."""

    replaces: ClassVar[bool] = True

    def kept(self, members: Sequence[Member], advantage: float) -> tuple[str, ...]:
        return super().kept(members, advantage) if advantage > 0 else ()

    def order(self, worth: Worth, uniform: float) -> float:
        return worth.advantage


class Return(Priority):
    """Each group with a probability in proportion to exp(return / temperature), without replacement (S157).

    The largest of R / temperature + Gumbel noise is such a draw (Gumbel top-k).
    """

    draws: ClassVar[bool] = True
    temperature: PositiveFloat = 1.0
    """Unit of the return, which is the mean success reward of a group. A lower one prefers successes more."""

    def order(self, worth: Worth, uniform: float) -> float:
        return worth.mean_return / self.temperature - log(-log(uniform))


class SuccessPerTask(Priority):
    """One stored success per task, which a later group of the task gets that has none (RAPO, S067; DART, S008)."""

    by_task: ClassVar[bool] = True
    after_groups: Annotated[float, Meta(ge=1, le=1000)] = 1
    """Number of consecutive groups of the task without a success, the one that gets the stored success included."""
    success_min: float = 1.0
    """Least success reward of a success."""

    def check_fields(self) -> None:
        """Raises SettingError."""
        _check_whole("after_groups", self.after_groups)

    def kept(self, members: Sequence[Member], advantage: float) -> tuple[str, ...]:
        found = [member.sample_id for member in members if member.used and member.reward >= self.success_min]
        return tuple(found[-1:])


class Compensation(Priority):
    """RoRecomp (S050): an update trains the shortest correct and the longest incorrect samples of its batch. The rest
    waits in the log, and is trained in an extra update when the log has no room for the rest of another batch."""

    once: ClassVar[bool] = True
    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of the correct samples, and of the incorrect ones, that the update of their batch trains, rounded up."""
    extra_updates: Annotated[float, Meta(ge=0, le=1)] = 1
    """1: train the rest in extra updates. 0: never."""
    success_min: float = 1.0
    """Least success reward of a correct sample."""

    def check_fields(self) -> None:
        """Raises SettingError."""
        _check_whole("extra_updates", self.extra_updates)

    def kept(self, members: Sequence[Member], advantage: float) -> tuple[str, ...]:
        return ()

    def order(self, worth: Worth, uniform: float) -> float:
        return worth.age

    def first(self, members: Sequence[Member]) -> set[str]:
        """Return the samples that are trained with their batch."""
        correct = sorted((m for m in members if m.reward >= self.success_min), key=lambda m: m.num_tokens)
        wrong = sorted((m for m in members if m.reward < self.success_min), key=lambda m: -m.num_tokens)
        return {m.sample_id for part in (correct, wrong) for m in part[: ceil(self.alpha * len(part))]}


PRIORITIES: dict[str, type[Priority]] = {
    "fifo": Fifo,
    "advantage": Advantage,
    "return": Return,
    "success_per_task": SuccessPerTask,
    "compensation": Compensation,
}


def make_priority(name: str, options: Mapping[str, float]) -> Priority:
    """Return the priority of this name. Raises SettingError."""
    return _make(name, tuple(sorted(options.items())))


@lru_cache
def _make(name: str, options: tuple[tuple[str, float], ...]) -> Priority:
    if name not in PRIORITIES:
        raise SettingError("priority", f"must be one of {', '.join(PRIORITIES)}, got {name!r}")
    type_ = PRIORITIES[name]
    known = [field.name for field in msgspec.structs.fields(type_)]
    if unknown := next((option for option, _ in options if option not in known), None):
        raise SettingError(
            f"options.{unknown}", f"must be an option of {name} ({', '.join(known) or 'it has none'}), got {unknown!r}"
        )
    try:
        return type_(**dict(options))
    except SettingError as error:
        raise SettingError(f"options.{error.field}", error.what) from error
