"""The state of the draws of a run: a fold of the ledger.

`apply` folds one record, `positions` draws. The ledger determines the state: the task of each draw, the open groups,
the results of kept groups until a checkpoint holds the update that used them, and the evidence of the selector. The
snapshot contains only this state. Besides it, `issued` holds draws that the coordinator has not recorded. It makes a
repeated call return the same task, and keeps a task from being twice in one batch. A crash may lose it, because a draw
that is not in the ledger has not happened.

This module is pure: it uses no clock and no I/O. The same snapshot and the same facts give the same next draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field

import msgpack
from google.protobuf.message import Message

from rollmesh.services.data.selector import GroupResult, Selector, SourceShare
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.codec.plans import encode_plan
from rollmesh.shared.codec.trajectory import decode_trained_group
from rollmesh.shared.config.settings import SettingError
from rollmesh.shared.domain.plans import Plan
from rollmesh.shared.domain.versions import DEFAULT_POLICY
from rollmesh.shared.errors import CorruptSnapshot, InvalidInput, OutOfRange
from rollmesh.v1 import events_pb2, reward_pb2, types_pb2

DRAWS_REMEMBERED_MAX = 8192
"""Limit of draws whose task is stored, per policy. For an older draw, a selector that learns may return another
task."""

DRAWS_OUTSTANDING_MAX = 1024
"""Issued draws this far behind the latest recorded draw were dropped by the coordinator. They no longer count as in
flight."""

KEPT_GROUPS_MAX = 8192
"""Limit of kept groups whose result is stored, the newest ones. `observe_trained` does not get an older group."""

_SCHEMA = "draws@2"

SelectorFactory = Callable[[TaskPool], Selector]


@dataclass(slots=True)
class _OpenGroup:
    policy: str
    position: int
    num_open: int
    """Number of episodes that may still be scored. A group that loses all of them is never decided."""


@dataclass(slots=True)
class _KeptGroup:
    policy: str
    position: int
    successes: float
    failures: float
    update: int = 0
    """Update that used it; 0 before."""


@dataclass(slots=True)
class _PolicyDraws:
    selector: Selector
    reserved: dict[int, int] = field(default_factory=dict)
    """Position by draw, from the ledger."""
    issued: dict[int, int] = field(default_factory=dict)
    """Position by draw, returned to the coordinator but not in the ledger."""
    plans: dict[int, Plan] = field(default_factory=dict)
    """Plan by draw, of issued draws."""


class RunDraws:
    """The draws of one run over one training pool, per policy."""

    def __init__(
        self, *, pool: TaskPool, new_selector: SelectorFactory, success_reward: str = "", num_draws_max: int = 0
    ) -> None:
        """An empty `success_reward` means that of the run, and `num_draws_max` 0 no limit."""
        self._pool = pool
        self._new_selector = new_selector
        self._reward_configured = success_reward
        self._reward_of_run = ""
        self._num_draws_max = num_draws_max
        self._policies: dict[str, _PolicyDraws] = {}
        self._open: dict[str, _OpenGroup] = {}
        self._kept: dict[str, _KeptGroup] = {}
        self.num_unlearned = 0
        """Number of decided groups in which no member has the success reward. The selector learns nothing from them."""

    @property
    def success_reward(self) -> str:
        """Name of the reward that is read as success. Empty until the run names one."""
        return self._reward_configured or self._reward_of_run

    @property
    def num_open_groups(self) -> int:
        return len(self._open)

    def source_shares(self, policy: str = DEFAULT_POLICY) -> list[SourceShare]:
        """Return the shares of the sources, as the selector of a policy gives them to its next draw."""
        draws = self._policies.get(policy)
        if draws is None:
            return []
        return list(draws.selector.source_shares(max((-1, *draws.reserved, *draws.issued)) + 1))

    def selector(self, policy: str) -> Selector:
        """Return the selector of a policy."""
        return self._draws(policy).selector

    def positions(self, policy: str, first_draw: int, num: int) -> list[int]:
        """Return pool positions of draws [first_draw, first_draw + num), fewer at the end. Raise OutOfRange beyond the
        end, and InvalidInput for a plan that no run could have."""
        stop = first_draw + num
        if self._num_draws_max:
            stop = min(stop, self._num_draws_max)
        if first_draw >= stop:
            raise OutOfRange(
                f"`first_draw` must be < {self._num_draws_max}, the draws of all epochs, got {first_draw}; raise "
                "data.epochs_max",
                draw=first_draw,
            )
        draws = self._draws(policy)
        return [self._position(policy, draws, index) for index in range(first_draw, stop)]

    def plans(self, policy: str, first_draw: int, num: int) -> list[Plan]:
        """Return the plans of draws whose positions have been returned. That of a draw in the ledger is the default,
        because its group has been reserved already."""
        known = self._draws(policy).plans
        return [known.get(index, Plan()) for index in range(first_draw, first_draw + num)]

    def apply(self, facts: Iterable[Message]) -> None:
        """Fold the facts of one record. Facts about unknown groups and tasks are ignored."""
        lost: set[str] = set()
        for fact in facts:
            self._apply(fact)
            if isinstance(fact, events_pb2.EpisodeEnded):
                lost.add(fact.group)
        # After all facts: one record may end the last episode of a group and add new ones.
        for name in lost:
            if name in self._open and self._open[name].num_open <= 0:
                del self._open[name]

    def _apply(self, fact: Message) -> None:
        match fact:
            case events_pb2.RunCreated():
                self._reward_of_run = fact.spec.success_reward
            case events_pb2.GroupReserved() if fact.purpose == types_pb2.PURPOSE_TRAIN and not fact.submitted_key:
                # Groups of an evaluation take tasks in order, and do not inform the selector, nor do samples of others.
                self._drawn(fact, fact.policy or DEFAULT_POLICY)
            case events_pb2.EpisodesAdded():
                self._grow(fact.group, fact.num_episodes)
            case events_pb2.EpisodeEnded():
                self._grow(fact.group, -1)
            case events_pb2.GroupFinalized() if fact.decision != reward_pb2.GROUP_DECISION_EXTEND:
                self._decided(fact)
            case events_pb2.UpdateCommitted():
                for measured in fact.groups:
                    self._trained(measured, fact.update)
            case events_pb2.CheckpointReported():
                policy = fact.policy or DEFAULT_POLICY
                saved = [n for n, g in self._kept.items() if g.policy == policy and 0 < g.update <= fact.update]
                for name in saved:
                    del self._kept[name]
            case events_pb2.RolledBack():
                policy = fact.policy or DEFAULT_POLICY
                for group in self._kept.values():
                    if group.policy == policy and group.update > fact.to_update:
                        group.update = 0
            case events_pb2.RunEnded():
                self._open.clear()

    def snapshot(self) -> bytes:
        """Return the state that the ledger determines. It does not contain `issued`."""
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
            "kept": {name: astuple(group) for name, group in self._kept.items()},
        }
        return bytes(msgpack.packb(state))

    def restore(self, state: bytes) -> None:
        """Replace the state, and drop issued draws. Raise CorruptSnapshot, without a change, if `state` is not of this
        pool."""
        try:
            fields = msgpack.unpackb(state, strict_map_key=False)
            if fields["schema"] != _SCHEMA or fields["pool"] != self._pool.digest:
                raise CorruptSnapshot(
                    "the snapshot is of another task source; restore it with its own settings, or fold the ledger "
                    "without it"
                )
            reward = str(fields["success_reward"])
            policies = {str(name): self._restored(*parts) for name, parts in fields["policies"].items()}
            groups = {str(name): _OpenGroup(*parts) for name, parts in fields["open"].items()}
            kept = {str(name): _KeptGroup(*parts) for name, parts in fields["kept"].items()}
        except (msgpack.UnpackException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptSnapshot(f"not a snapshot of draws: {error!r}; fold the ledger without it") from error
        self._reward_of_run, self._policies, self._open, self._kept = reward, policies, groups, kept

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
        draws.plans[index] = _plan(draws.selector, index, position, in_flight)
        _remember(draws.issued, index, position)
        for old in draws.plans.keys() - draws.issued.keys():
            del draws.plans[old]
        return position

    def _drawn(self, fact: events_pb2.GroupReserved, policy: str) -> None:
        draws = self._draws(policy)
        for index in [i for i in draws.issued if i == fact.draw or i < fact.draw - DRAWS_OUTSTANDING_MAX]:
            del draws.issued[index]
            draws.plans.pop(index, None)
        position = self._pool.position(fact.task.task_id)
        if position is None:
            return
        _remember(draws.reserved, fact.draw, position)
        self._open[fact.group] = _OpenGroup(policy, position, fact.num_episodes)

    def _grow(self, name: str, num_episodes: int) -> None:
        if name in self._open:
            self._open[name].num_open += num_episodes

    def _decided(self, fact: events_pb2.GroupFinalized) -> None:
        group = self._open.pop(fact.group, None)
        if group is None:
            return
        scored = [_ok_rewards(member) for member in fact.members]
        rates = [min(1.0, max(0.0, m[self.success_reward])) for m in scored if self.success_reward in m]
        result = GroupResult(position=group.position, successes=sum(rates), failures=len(rates) - sum(rates))
        if fact.decision == reward_pb2.GROUP_DECISION_KEEP:
            self._kept[fact.group] = _KeptGroup(group.policy, result.position, result.successes, result.failures)
            if len(self._kept) > KEPT_GROUPS_MAX:
                del self._kept[next(iter(self._kept))]
        if rates:
            self._draws(group.policy).selector.observe(result)
        else:
            self.num_unlearned += 1

    def _trained(self, measured: events_pb2.TrainedGroup, update: int) -> None:
        group = self._kept.get(measured.group)
        if group is None:
            return
        group.update = update
        trained = decode_trained_group(measured)
        self._draws(group.policy).selector.observe_trained(
            GroupResult(position=group.position, successes=group.successes, failures=group.failures, trained=trained)
        )


def _plan(selector: Selector, index: int, position: int, in_flight: set[int]) -> Plan:
    what = f"the plan of the selector {type(selector).__name__} for draw {index}"
    try:
        plan = selector.plan(index, position, in_flight)
    except SettingError as error:
        raise InvalidInput(f"{what}: {error}; correct the selector") from error
    if not isinstance(plan, Plan):
        raise InvalidInput(f"{what} must be a Plan, got a {type(plan).__name__}; correct the selector")
    try:
        encode_plan(plan)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} cannot be sent: {error}; correct the selector") from error
    return plan


def _remember(draws: dict[int, int], index: int, position: int) -> None:
    draws[index] = position
    if len(draws) > DRAWS_REMEMBERED_MAX:
        del draws[min(draws)]


def _ok_rewards(member: reward_pb2.SampleRewards) -> dict[str, float]:
    return {r.name: r.value for r in member.rewards if r.outcome == types_pb2.REWARD_OUTCOME_OK}
