"""The state of a run's draws: a fold of the ledger, and nothing else that counts.

`apply` folds one record; `tasks` answers draws. Two kinds of memory, one of them worthless: what the ledger says (which draw
took which task, which groups are open, what the selector learnt) is the state and makes up the snapshot. `issued`, answers
given but not yet recorded by the coordinator, only keeps a repeated question from getting another answer, and a batch from
holding a task twice; a crash may lose it, since a draw that is not in the ledger did not happen.

Pure: no clock, no I/O. Same snapshot and same facts, same next draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgpack

from rollmesh.services.data.facts import (
    DataFact,
    EpisodeLost,
    GroupDrawn,
    GroupGrew,
    GroupOutcome,
    RunBegan,
    RunClosed,
)
from rollmesh.services.data.selector import GroupResult, Selector
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.errors import CorruptSnapshot, OutOfRange

DRAWS_REMEMBERED_MAX = 8192
"""Draws whose task is remembered per policy. Asked again beyond that, a selector that learns may answer differently."""

DRAWS_OUTSTANDING_MAX = 1024
"""Answers this far behind the latest recorded draw were given up by the coordinator; they stop counting as in flight."""

_SCHEMA = "draws@1"

SelectorFactory = Callable[[TaskPool], Selector]


@dataclass(slots=True)
class _OpenGroup:
    policy: str
    position: int
    num_open: int
    """Episodes that may still be scored; a group that loses them all is never decided on."""


@dataclass(slots=True)
class _PolicyDraws:
    selector: Selector
    reserved: dict[int, int] = field(default_factory=dict)
    """Draw -> position, from the ledger."""
    issued: dict[int, int] = field(default_factory=dict)
    """Draw -> position, answered but not in the ledger."""


class RunDraws:
    """The draws of one run over one training pool, per policy."""

    def __init__(
        self, *, pool: TaskPool, new_selector: SelectorFactory, success_reward: str = "", num_draws_max: int = 0
    ) -> None:
        """`success_reward` empty: the run's own. `num_draws_max` 0: no limit."""
        self._pool = pool
        self._new_selector = new_selector
        self._reward_configured = success_reward
        self._reward_of_run = ""
        self._num_draws_max = num_draws_max
        self._policies: dict[str, _PolicyDraws] = {}
        self._open: dict[str, _OpenGroup] = {}
        self.num_unlearned = 0
        """Decided groups without the success reward in any member: a selector that learns goes blind if this grows."""

    @property
    def success_reward(self) -> str:
        """Name of the reward read as success; empty while the run has not named one."""
        return self._reward_configured or self._reward_of_run

    @property
    def num_open_groups(self) -> int:
        return len(self._open)

    def positions(self, policy: str, first_draw: int, num: int) -> list[int]:
        """Positions in the pool for draws [first_draw, first_draw + num), fewer at the end. OutOfRange beyond the end."""
        stop = first_draw + num
        if self._num_draws_max:
            stop = min(stop, self._num_draws_max)
        if first_draw >= stop:
            raise OutOfRange(
                f"draw {first_draw} is beyond the last of {self._num_draws_max}: the epochs are used up; raise `epochs_max`",
                draw=first_draw,
            )
        draws = self._draws(policy)
        return [self._position(policy, draws, index) for index in range(first_draw, stop)]

    def apply(self, facts: Iterable[DataFact]) -> None:
        """Folds the facts of one record. Facts about groups and tasks this state does not know change nothing."""
        for fact in facts:
            self._apply(fact)
        # Only now: one decision may end a group's last episode and refill it.
        self._open = {name: group for name, group in self._open.items() if group.num_open > 0}

    def _apply(self, fact: DataFact) -> None:
        match fact:
            case RunBegan():
                self._reward_of_run = fact.success_reward
            case GroupDrawn():
                self._drawn(fact)
            case GroupGrew():
                self._grow(fact.group, fact.num_episodes)
            case EpisodeLost():
                self._grow(fact.group, -1)
            case GroupOutcome():
                self._decided(fact)
            case RunClosed():
                self._open.clear()

    def snapshot(self) -> bytes:
        """What the ledger has told so far; `issued` is left out on purpose."""
        policies = {
            name: [list(draws.reserved.items()), draws.selector.snapshot()] for name, draws in self._policies.items()
        }
        groups = {name: [group.policy, group.position, group.num_open] for name, group in self._open.items()}
        state = {
            "schema": _SCHEMA,
            "pool": self._pool.digest,
            "success_reward": self._reward_of_run,
            "policies": policies,
            "open": groups,
        }
        return bytes(msgpack.packb(state))

    def restore(self, state: bytes) -> None:
        """Replaces the state, issued draws included. CorruptSnapshot (and no change) if `state` is not one of this pool."""
        try:
            fields = msgpack.unpackb(state, strict_map_key=False)
            if fields["schema"] != _SCHEMA or fields["pool"] != self._pool.digest:
                raise CorruptSnapshot(
                    "the snapshot is of another task source; restore with the settings it was taken with, "
                    "or leave it out to fold the ledger from its start"
                )
            reward = str(fields["success_reward"])
            policies = {str(name): self._restored(*parts) for name, parts in fields["policies"].items()}
            groups = {str(name): _OpenGroup(*parts) for name, parts in fields["open"].items()}
        except (msgpack.UnpackException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptSnapshot(f"not a snapshot of draws: {error!r}; leave it out to fold the ledger") from error
        self._reward_of_run, self._policies, self._open = reward, policies, groups

    def _restored(self, reserved: list[list[int]], selector: bytes) -> _PolicyDraws:
        draws = _PolicyDraws(self._new_selector(self._pool), {int(draw): int(at) for draw, at in reserved})
        draws.selector.restore(selector)
        return draws

    def _draws(self, policy: str) -> _PolicyDraws:
        if policy not in self._policies:
            self._policies[policy] = _PolicyDraws(self._new_selector(self._pool))
        return self._policies[policy]

    def _position(self, policy: str, draws: _PolicyDraws, index: int) -> int:
        for known in (draws.reserved, draws.issued):
            if index in known:
                return known[index]
        in_flight = {group.position for group in self._open.values() if group.policy == policy} | set(
            draws.issued.values()
        )
        position = draws.selector.draw(index, in_flight)
        _remember(draws.issued, index, position)
        return position

    def _drawn(self, fact: GroupDrawn) -> None:
        draws = self._draws(fact.policy)
        for index in [i for i in draws.issued if i == fact.draw or i < fact.draw - DRAWS_OUTSTANDING_MAX]:
            del draws.issued[index]
        position = self._pool.position(fact.task_id)
        if position is None:
            return
        _remember(draws.reserved, fact.draw, position)
        self._open[fact.group] = _OpenGroup(fact.policy, position, fact.num_episodes)

    def _grow(self, name: str, num_episodes: int) -> None:
        if name in self._open:
            self._open[name].num_open += num_episodes

    def _decided(self, fact: GroupOutcome) -> None:
        group = self._open.pop(fact.group, None)
        if group is None:
            return
        rates = [min(1.0, max(0.0, m[self.success_reward])) for m in fact.members if self.success_reward in m]
        if not rates:
            self.num_unlearned += 1
            return
        result = GroupResult(position=group.position, successes=sum(rates), failures=len(rates) - sum(rates))
        self._draws(group.policy).selector.observe(result)


def _remember(draws: dict[int, int], index: int, position: int) -> None:
    draws[index] = position
    if len(draws) > DRAWS_REMEMBERED_MAX:
        del draws[min(draws)]
