"""The selector port: chooses the task of the next draw, and plans its group.

A selector is deterministic: the same configuration, the same results in the same order and the same draw index give the
same task. It does not count its draws, because only the ledger records them. Selectors are found by name, or loaded
from user code as `file.py:Name`.

A selector gets the result of a group twice: `observe` when the group is decided, and the optional `observe_trained`
when an update that used it is committed, with what the trainer measured. They are two methods, so that a selector
counts each group once without a check.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.domain.plans import Plan, SamplingOverrides, Variant
from rollmesh.shared.domain.trajectory import TrainedGroup

__all__ = ["SELECTORS", "GroupResult", "Plan", "SamplingOverrides", "Selector", "SourceShare", "Variant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The result of a group for its task.

    `successes` and `failures` are sums of p and 1 - p over the scored members, with p in [0, 1]. Infra failures are in
    neither sum. Both are 0 for a group that ended without a score.
    """

    position: int
    successes: float
    failures: float
    trained: TrainedGroup | None = None
    """What the update measured: `trained.measures` maps names to numbers, e.g. `mean_abs_advantage`. None in `observe`,
    because the group is not trained yet."""


class SourceShare(NamedTuple):
    """The share of one source of the tasks."""

    source: str
    requested: float
    """Share of the next draws."""
    decided: float
    """Share of the groups with a success reward so far; 0 before the first."""


class Selector(Plugin):
    """Base of selectors: chooses tasks of one pool for one policy.

    Constructed as `cls(pool=..., seed=..., options=...)`, or without `options` if the class has no `Options`.
    """

    @required
    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        """Return the pool position of draw `index` (0-based). `in_flight` are drawn positions without a result yet."""
        raise NotImplementedError

    def prepare(self, first: int, num: int) -> None:
        """Compute what draws [first, first + num) need, if that takes long. It runs in a thread before `draw`, which
        MUST return the same positions without it."""

    def plan(self, index: int, position: int, in_flight: AbstractSet[int]) -> Plan:
        """Return the group of draw `index`, whose task is at `position`: its size, the variants of its episodes, and
        the probability with which `draw` returned it. It is called once after `draw`, with the same arguments. The
        default is the group that the run is configured with. A plan that does not fit the run is an error, and the
        draw is repeated."""
        return Plan()

    @required
    def observe(self, result: GroupResult) -> None:
        """Fold the result of one group into the state."""

    def observe_trained(self, result: GroupResult) -> None:
        """Fold one group that an update used; `result.trained` is set. It is not called for groups that no update uses,
        and if the trainer measures nothing. After a roll-back it may be called again for a group, which is then trained
        again."""

    def source_shares(self, index: int) -> Iterable[SourceShare]:
        """Return the shares of the sources at a draw, for metrics, at most 64. Nothing unless the selector gives them
        shares."""
        return ()

    @required
    def snapshot(self) -> bytes:
        """Return the state. A selector that restores it continues with the same draws."""
        raise NotImplementedError

    @required
    def restore(self, state: bytes) -> None:
        """Replace the state. Raise CorruptSnapshot if `state` is not of this selector and pool."""


SELECTORS = Registry(
    "selector",
    {
        "uniform": "rollmesh.services.data.selectors.uniform:UniformSelector",
        "thompson": "rollmesh.services.data.selectors.thompson:ThompsonSelector",
        "sec": "rollmesh.services.data.selectors.sec:SecSelector",
        "dump": "rollmesh.services.data.selectors.dump:DumpSelector",
        "historical_variance": "rollmesh.services.data.selectors.historical_variance:HistoricalVarianceSelector",
        "changepoint": "rollmesh.services.data.selectors.changepoint:ChangepointSelector",
        "mixture": "rollmesh.services.data.selectors.mixture:MixtureSelector",
    },
    Selector,
)
