"""Small pools, selectors and ledger records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.selector import SELECTORS, Selector
from rollmesh.services.data.task import PoolTask, TaskPool
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Message
from rollmesh.v1 import events_pb2, reward_pb2, types_pb2


def pool(num_tasks: int) -> MemoryPool:
    return MemoryPool(
        PoolTask(task_id=f"t{i}", messages=(Message(role="user", content=str(i)),), labels={"level": str(i % 3)})
        for i in range(num_tasks)
    )


def leveled(*levels: str) -> MemoryPool:
    """Return tasks t0, t1, ... with these labels `level`."""
    return MemoryPool(
        PoolTask(task_id=f"t{i}", messages=(Message(role="user", content=str(i)),), labels={"level": level})
        for i, level in enumerate(levels)
    )


def factory(name: str = "thompson", **options: Any) -> Callable[[TaskPool], Selector]:
    return lambda tasks: SELECTORS.make(Extension(name, options), pool=tasks, seed=0)


def record(*facts: events_pb2.Fact) -> events_pb2.LedgerRecord:
    return events_pb2.LedgerRecord(record_id="r", facts=facts)


def created(success_reward: str = "correct") -> events_pb2.Fact:
    spec = events_pb2.RunSpec(run="r", success_reward=success_reward)
    return events_pb2.Fact(run_created=events_pb2.RunCreated(spec=spec))


def reserved(
    draw: int, task_id: str, *, num_episodes: int = 2, purpose: types_pb2.Purpose.ValueType = types_pb2.PURPOSE_TRAIN
) -> events_pb2.Fact:
    group = events_pb2.GroupReserved(
        group=f"g{draw}",
        purpose=purpose,
        policy="main",
        task=types_pb2.Task(task_id=task_id),
        draw=draw,
        num_episodes=num_episodes,
    )
    return events_pb2.Fact(group_reserved=group)


def lost(draw: int) -> events_pb2.Fact:
    return events_pb2.Fact(episode_ended=events_pb2.EpisodeEnded(group=f"g{draw}", end=types_pb2.SAMPLE_END_FAILED))


def added(draw: int, num_episodes: int) -> events_pb2.Fact:
    return events_pb2.Fact(episodes_added=events_pb2.EpisodesAdded(group=f"g{draw}", num_episodes=num_episodes))


def ended() -> events_pb2.Fact:
    return events_pb2.Fact(run_ended=events_pb2.RunEnded(reason="UPDATES_MAX"))


def finalized(
    draw: int,
    *values: float | None,
    name: str = "correct",
    decision: reward_pb2.GroupDecision.ValueType = reward_pb2.GROUP_DECISION_KEEP,
) -> events_pb2.Fact:
    """Return a decided group. None is a member whose scorer failed."""
    members: list[reward_pb2.SampleRewards] = []
    for value in values:
        outcome = types_pb2.REWARD_OUTCOME_INFRA_FAILURE if value is None else types_pb2.REWARD_OUTCOME_OK
        reward = types_pb2.Reward(name=name, value=value or 0.0, segment=-1, outcome=outcome)
        members.append(reward_pb2.SampleRewards(sample_id=f"g{draw}.{len(members)}", rewards=[reward]))
    group = events_pb2.GroupFinalized(group=f"g{draw}", decision=decision, members=members)
    return events_pb2.Fact(group_finalized=group)


def committed(update: int, **mean_abs_advantage: float) -> events_pb2.Fact:
    """Return an update that measured groups, given by name. The policy loss is the negative advantage, on 10 tokens."""
    groups = [
        events_pb2.TrainedGroup(group=name, mean_abs_advantage=value, policy_loss=-value, num_tokens=10)
        for name, value in mean_abs_advantage.items()
    ]
    return events_pb2.Fact(update_committed=events_pb2.UpdateCommitted(policy="main", update=update, groups=groups))


def checkpointed(update: int) -> events_pb2.Fact:
    return events_pb2.Fact(checkpoint_reported=events_pb2.CheckpointReported(policy="main", update=update))


def rolled_back(to_update: int) -> events_pb2.Fact:
    return events_pb2.Fact(rolled_back=events_pb2.RolledBack(policy="main", to_update=to_update, incarnation=1))
