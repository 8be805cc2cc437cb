"""The history that the page shows, from the facts of a ledger."""

from __future__ import annotations

import pytest

from rollmesh.services.gateway.page import history as module
from rollmesh.services.gateway.page.history import RunHistory
from rollmesh.v1 import events_pb2 as ev
from rollmesh.v1 import reward_pb2, types_pb2


class Records:
    """Enters facts as records, one second apart."""

    def __init__(self) -> None:
        self.history = RunHistory()
        self.add(run_created=ev.RunCreated(spec=ev.RunSpec(run="r", max_staleness=2, success_reward="correct")))

    def add(self, **fact: object) -> None:
        position = self.history.position + 1
        record = ev.LedgerRecord(record_id=str(position), time_unix_s=1000.0 + position, facts=[ev.Fact(**fact)])  # type: ignore[arg-type]
        self.history.enter(record, position)

    def group(
        self, name: str, rewards: list[float], step: int, purpose: types_pb2.Purpose.ValueType = types_pb2.PURPOSE_TRAIN
    ) -> list[str]:
        """Reserve a group and score a sample per reward. Return their ids."""
        reserved = ev.GroupReserved(
            group=name, purpose=purpose, task=types_pb2.Task(task_id="t"), num_episodes=len(rewards), step_min=step
        )
        self.add(group_reserved=reserved)
        names = []
        for number, value in enumerate(rewards):
            names.append(f"{name}.{number}-0")
            reward = types_pb2.Reward(name="correct", value=value, segment=-1, outcome=types_pb2.REWARD_OUTCOME_OK)
            meta = types_pb2.SampleMeta(
                sample_id=names[-1], steps=[types_pb2.StepSpan(step=step, num_tokens=5)], num_tokens=9, rewards=[reward]
            )
            self.add(episode_scored=ev.EpisodeScored(group=name, episode=f"{name}.{number}", samples=[meta]))
        return names

    def train(self, update: int, names: list[str], samples: list[str], **fields: object) -> None:
        self.add(batch_leased=ev.BatchLeased(lease_id=f"l{update}", update=update, groups=names, sample_ids=samples))
        committed = ev.UpdateCommitted(update=update, lease_ids=[f"l{update}"], used=samples, applied=True, **fields)  # type: ignore[arg-type]
        self.add(update_committed=committed)


def test_an_update_has_its_staleness_rewards_and_measurements() -> None:
    records = Records()
    old, new = records.group("g0", [1.0, 0.0], step=1), records.group("g1", [1.0, 1.0], step=3)
    measured = [
        ev.TrainedGroup(group="g0", mean_abs_advantage=1.0, policy_loss=-0.5, num_tokens=30),
        ev.TrainedGroup(group="g1", measures={"mean_abs_advantage": 0.0, "policy_loss": 0.5, "num_tokens": 10}),
        ev.TrainedGroup(group="g2", measures={"regret": 1.0}),
    ]
    records.train(4, ["g0", "g1"], [*old, *new], groups=measured)
    (point,) = records.history.updates
    assert (point.update, point.lags, point.ends) == (4, {0: 2, 2: 2}, {"used": 4})
    assert point.rewards == {"correct": 0.75}
    assert (point.abs_advantage, point.policy_loss) == (0.75, -0.25)
    assert records.history.recent[0].end == "used"
    assert records.history.recent[0].update == 4


def test_replayed_samples_have_their_own_staleness() -> None:
    records = Records()
    samples = records.group("g0", [1.0], step=0)
    records.train(1, ["g0"], samples)
    records.add(checkpoint_reported=ev.CheckpointReported(update=1))
    again = ev.ReplayedSample(sample_id="r0.0", original_id="g0.0-0", steps=[types_pb2.StepSpan(step=0, num_tokens=5)])
    records.add(samples_replayed=ev.SamplesReplayed(group="r0", original_group="g0", samples=[again], update=4))
    fresh = records.group("g1", [0.0], step=3)
    records.train(4, ["g1", "r0"], [*fresh, "r0.0"])
    first, second = records.history.updates
    assert (first.lags, first.replayed) == ({0: 1}, {})
    assert (second.lags, second.replayed, second.ends) == ({0: 1}, {3: 1}, {"used": 1})


def test_samples_that_end_otherwise_are_counted_at_the_next_update() -> None:
    records = Records()
    used, stale = records.group("g0", [1.0], step=0), records.group("g1", [0.0, 0.0], step=0)
    filtered = records.group("g2", [1.0, 1.0, 1.0], step=0)
    records.add(
        samples_ended=ev.SamplesEnded(
            sample_ids=stale, end=types_pb2.SAMPLE_END_STALE, reason="BEYOND_BOUND", group="g1"
        )
    )
    decision = reward_pb2.GROUP_DECISION_FILTER
    records.add(group_finalized=ev.GroupFinalized(group="g2", decision=decision, reason="ZERO_VARIANCE"))
    ended = ev.EpisodeEnded(
        group="g0", episode="g0.9", end=types_pb2.SAMPLE_END_FAILED, reason="TRIES_EXHAUSTED", cause="sandbox"
    )
    records.add(episode_ended=ended)
    records.train(1, ["g0"], used)
    assert records.history.updates[0].ends == {"used": 1, "stale": 2, "filtered": 3, "failed": 1}
    states = {one.sample_id: (one.end, one.reason) for one in records.history.recent}
    assert states[filtered[0]] == ("filtered", "ZERO_VARIANCE")
    assert states["g0.9"] == ("failed", "TRIES_EXHAUSTED: sandbox")


def test_a_dropped_member_keeps_its_reason_when_the_rest_of_its_group_is_filtered() -> None:
    records = Records()
    first, *others = records.group("g0", [1.0, 1.0, 1.0], step=0)
    dropped = ev.SamplesEnded(sample_ids=[first], end=types_pb2.SAMPLE_END_FILTERED, reason="LOOP", group="g0")
    decision = reward_pb2.GROUP_DECISION_FILTER
    records.add(samples_ended=dropped)
    records.add(group_finalized=ev.GroupFinalized(group="g0", decision=decision, reason="ZERO_VARIANCE"))
    records.train(1, [], [])
    assert records.history.updates[0].ends == {"filtered": 3}
    states = {one.sample_id: one.reason for one in records.history.recent}
    assert states == {first: "LOOP"} | dict.fromkeys(others, "ZERO_VARIANCE")


def test_evaluation_is_not_training() -> None:
    records = Records()
    records.group("e2.0.0", [1.0], step=2, purpose=types_pb2.PURPOSE_EVAL)
    end = ev.SamplesEnded(
        sample_ids=["e2.0.0.0-0"], end=types_pb2.SAMPLE_END_EXPORTED, reason="EVALUATED", group="e2.0.0"
    )
    records.add(samples_ended=end)
    records.train(1, [], [])
    assert records.history.updates[0].ends == {}
    assert [one.step for one in records.history.evals.values()] == [2]
    assert records.history.recent[0].purpose == "eval"


def test_a_roll_back_removes_its_updates_and_marks_their_samples() -> None:
    records = Records()
    for update in (1, 2, 3):
        records.train(update, [f"g{update}"], records.group(f"g{update}", [1.0], step=update - 1))
    records.add(rolled_back=ev.RolledBack(to_update=1, incarnation=1))
    assert [point.update for point in records.history.updates] == [1]
    assert [one.end for one in records.history.recent] == ["used", "live", "live"]


def test_a_returned_batch_is_live_again() -> None:
    records = Records()
    names = records.group("g0", [1.0], step=0)
    records.add(batch_leased=ev.BatchLeased(lease_id="l", update=1, groups=["g0"], sample_ids=names))
    assert records.history.recent[0].end == "leased"
    records.add(batch_returned=ev.BatchReturned(lease_id="l", reason="RELEASED"))
    assert records.history.recent[0].end == "live"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"RECENT_MAX": 10, "GROUPS_MAX": 5, "LIVE_MAX": 8, "POINTS_MAX": 4, "UPDATES_MAX": 12}
    for name, value in limits.items():
        monkeypatch.setattr(module, name, value)
    records = Records()
    for update in range(1, 31):
        records.train(update, [f"g{update}"], records.group(f"g{update}", [1.0, 0.0], step=update - 1))
    history = records.history
    assert (len(history.recent), len(history._by_id), len(history._groups), len(history._samples)) == (10, 10, 5, 8)
    assert len(history.updates) <= 12
    assert not history._leases
    points = history.points()
    assert len(points) <= 4
    assert (sum(point.num_updates for point in points), points[-1].update) == (30, 30)
    assert sum(point.ends["used"] for point in points) == 60
    assert points[0].rewards == {"correct": 0.5}


def test_samples_in_a_checkpoint_are_dropped_and_those_after_it_may_return() -> None:
    records = Records()
    names = {update: records.group(f"g{update}", [1.0, 0.0], step=update - 1) for update in (1, 2, 3)}
    for update in (1, 2, 3):
        records.add(group_finalized=ev.GroupFinalized(group=f"g{update}", decision=reward_pb2.GROUP_DECISION_KEEP))
        records.train(update, [f"g{update}"], names[update])
    records.add(checkpoint_reported=ev.CheckpointReported(update=2))
    assert list(records.history._samples) == names[3]
    assert not any(group.members for group in records.history._groups.values())
    records.add(rolled_back=ev.RolledBack(to_update=2, incarnation=1))
    records.train(3, ["g3"], names[3])
    assert [(point.update, point.lags) for point in records.history.updates][-1] == (3, {0: 2})
    records.add(checkpoint_reported=ev.CheckpointReported(update=3))
    assert not records.history._samples


def test_a_merged_update_counts_as_often_as_the_updates_in_it() -> None:
    def point(update: int, reward: float | None) -> module.PageUpdate:
        rewards = {} if reward is None else {"correct": reward}
        return module.PageUpdate(
            update=update, incarnation=0, time_unix_s=update, applied=True, rewards=rewards, policy_loss=reward
        )

    first = module._merged([point(1, 1.0), point(2, 1.0), point(3, None)])
    both = module._merged([first, point(4, 0.0)])
    assert (both.update, both.num_updates) == (4, 4)
    assert both.rewards == {"correct": 0.75}
    assert both.policy_loss == 0.75
