"""The facts of a ledger record that change which task is drawn next.

All other facts are ignored. Facts of evaluation groups are among them, because these groups take tasks in order and do not inform the
selector.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

DEFAULT_POLICY = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegan:
    """The run began, and named the reward that counts as success."""

    success_reward: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDrawn:
    """A draw was consumed."""

    group: str
    policy: str
    draw: int
    task_id: str
    num_episodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGrew:
    """A group got further episodes."""

    group: str
    num_episodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLost:
    """An episode ended without a score."""

    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """A group was kept or filtered. One mapping of OK rewards per scored member."""

    group: str
    members: tuple[dict[str, float], ...]
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsTrained:
    """An update was committed, with measurements on groups of its batch."""

    update: int
    groups: tuple[TrainedGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesSaved:
    """A checkpoint holds the updates up to this one, so their groups are not trained again."""

    policy: str
    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesUndone:
    """The updates after this one were rolled back, so their groups may be trained again."""

    policy: str
    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed:
    """The run ended, so no group is in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReopened:
    """A run that had ended was resumed."""


DataFact = (
    RunBegan
    | GroupDrawn
    | GroupGrew
    | EpisodeLost
    | GroupOutcome
    | GroupsTrained
    | UpdatesSaved
    | UpdatesUndone
    | RunClosed
    | RunReopened
)


def facts_of(record: events_pb2.LedgerRecord) -> Iterator[DataFact]:
    """Yield the relevant facts of one record in their order."""
    for fact in record.facts:
        found = _fact(fact)
        if found is not None:
            yield found


def _fact(fact: events_pb2.Fact) -> DataFact | None:
    match fact.WhichOneof("fact"):
        case "run_created":
            return RunBegan(success_reward=fact.run_created.spec.success_reward)
        case "group_reserved":
            return _drawn(fact.group_reserved)
        case "episodes_added":
            return GroupGrew(group=fact.episodes_added.group, num_episodes=fact.episodes_added.num_episodes)
        case "episode_ended":
            return EpisodeLost(group=fact.episode_ended.group)
        case "group_finalized":
            return _decided(fact.group_finalized)
        case "update_committed" if fact.update_committed.groups:
            return GroupsTrained(
                update=fact.update_committed.update, groups=tuple(_trained(g) for g in fact.update_committed.groups)
            )
        case "checkpoint_reported":
            saved = fact.checkpoint_reported
            return UpdatesSaved(policy=saved.policy or DEFAULT_POLICY, update=saved.update)
        case "rolled_back":
            undone = fact.rolled_back
            return UpdatesUndone(policy=undone.policy or DEFAULT_POLICY, update=undone.to_update)
        case "run_ended":
            return RunClosed()
        case "run_changed" if fact.run_changed.reopened:
            return RunReopened()
        case _:
            return None


def _drawn(reserved: events_pb2.GroupReserved) -> GroupDrawn | None:
    if reserved.purpose != types_pb2.PURPOSE_TRAIN:
        return None
    return GroupDrawn(
        group=reserved.group,
        policy=reserved.policy or DEFAULT_POLICY,
        draw=reserved.draw,
        task_id=reserved.task.task_id,
        num_episodes=reserved.num_episodes,
    )


def _decided(finalized: events_pb2.GroupFinalized) -> GroupOutcome | None:
    if finalized.decision == reward_pb2.GROUP_DECISION_EXTEND:
        return None
    members = tuple(
        {r.name: r.value for r in member.rewards if r.outcome == types_pb2.REWARD_OUTCOME_OK}
        for member in finalized.members
    )
    return GroupOutcome(
        group=finalized.group, members=members, kept=finalized.decision == reward_pb2.GROUP_DECISION_KEEP
    )


def _trained(group: events_pb2.TrainedGroup) -> TrainedGroup:
    return TrainedGroup(
        group=group.group,
        mean_abs_advantage=group.mean_abs_advantage,
        policy_loss=group.policy_loss,
        num_tokens=group.num_tokens,
    )
