"""Members that a finalizer drops end as filtered before any lease, and stay in the context of their group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from rollmesh.services.coordinator.audit_history import sample_history
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.decision_context import DeadLetter, FinalizeGroup
from rollmesh.services.coordinator.core.facts import GroupDecision, SampleEnd
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.translate import finalize_request

from .core_run import CoreRun
from .test_audit import audit, doctored

KEEP, FILTER, EXTEND = GroupDecision.KEEP, GroupDecision.FILTER, GroupDecision.EXTEND


class Dropping(CoreRun):
    """A run whose finalizer drops samples of every group, by the number of their episode."""

    def __init__(self, drops: Mapping[int, str], decision: GroupDecision = KEEP, reason: str = "", **spec: Any) -> None:
        self._drops, self._decision, self._reason = drops, decision, reason
        super().__init__(**{"group_size": 3, "batch_groups": 1} | spec)

    def decide(self, group: str) -> i.GroupDecided:
        request = finalize_request(self.core.state, FinalizeGroup(group, deadline_passed=False))
        assert request is not None
        self.num_extend_max = request.num_extend_max
        return i.GroupDecided(
            group=group,
            decision=self._decision,
            reason=self._reason,
            num_extend=1,
            adjusted=tuple(
                f.SampleRewards(
                    sample_id=name, rewards=tuple(replace(reward, value=reward.value + 1) for reward in s.meta.rewards)
                )
                for name, s in self.core.state.groups[group].samples.items()
            ),
            dropped={f"{group}.{number}.0": reason for number, reason in self._drops.items()},
        )


def reasons(run: CoreRun) -> dict[str, int]:
    counters = run.core.state.counters
    assert counters.conserved
    assert counters.reserved == counters.live + sum(counters.ends.values())
    return {reason: num for reason, num in counters.reasons.items() if num}


def finalized(run: CoreRun) -> list[tuple[GroupDecision, str]]:
    return [(fact.decision, fact.reason) for fact in run.facts if isinstance(fact, f.GroupFinalized)]


def held(run: CoreRun) -> AuditReport:
    """Return the audit of the run. Its facts alone must give the state of the core."""
    folded = State()
    for fact in run.facts:
        apply(folded, fact)
    assert folded == run.core.state
    report = audit(run.records)
    assert report.holds, report.to_text()
    return report


def test_a_dropped_member_is_not_leased_and_stays_in_the_context_of_its_group() -> None:
    run = Dropping({1: "LOOP"})
    run.begin()
    made = run.generate(3, step=0)
    batch = run.lease(1)
    assert [sample.meta.sample_id for sample in batch.samples] == [made[0], made[2]]
    (group,) = batch.groups
    assert {member.sample_id: member.end for member in group.members} == {
        made[0]: "ready", made[1]: "filtered/LOOP", made[2]: "ready"
    }  # fmt: skip
    assert finalized(run) == [(KEEP, "")]
    digest = run.commit(1, batch.lease_id)
    run.checkpoint(1, digest)
    assert reasons(run) == {"filtered/LOOP": 1, "trained": 2}
    report = held(run)
    assert (report.samples.reserved, report.samples.trained, report.samples.filtered) == (3, 2, 1)
    assert [line.what for line in sample_history(run.records, made[1])][-2:] == [
        "ended: filtered LOOP",
        "its group was decided on: keep",
    ]


def test_drops_come_before_the_decision_in_the_same_record() -> None:
    run = Dropping({1: "LOOP", 2: "LATE"}, FILTER, "TOO_EASY")
    run.begin()
    made = run.generate(3, step=0)
    (record,) = [one for one in run.records if any(isinstance(fact, f.GroupFinalized) for fact in one.facts)]
    assert [fact for fact in record.facts if isinstance(fact, f.SamplesEnded | f.GroupFinalized)] == [
        f.SamplesEnded(group="g0", sample_ids=(made[1],), end=SampleEnd.FILTERED, reason="LOOP"),
        f.SamplesEnded(group="g0", sample_ids=(made[2],), end=SampleEnd.FILTERED, reason="LATE"),
        next(fact for fact in record.facts if isinstance(fact, f.GroupFinalized)),
    ]
    assert finalized(run) == [(FILTER, "TOO_EASY")]
    assert reasons(run) == {"filtered/LOOP": 1, "filtered/LATE": 1, "filtered/TOO_EASY": 1}
    assert not run.core.state.groups
    held(run)


@pytest.mark.parametrize("decision", [KEEP, FILTER])
def test_a_group_whose_members_are_all_dropped_is_filtered_with_the_most_frequent_reason(
    decision: GroupDecision,
) -> None:
    run = Dropping({0: "LATE", 1: "LOOP", 2: "LOOP"}, decision)
    run.begin()
    run.generate(3, step=0)
    assert finalized(run) == [(FILTER, "LOOP")]
    assert reasons(run) == {"filtered/LATE": 1, "filtered/LOOP": 2}
    assert not run.core.state.groups
    held(run)


def test_drops_and_adjusted_rewards_of_a_group_that_grows_have_no_effect_until_it_grows_no_more() -> None:
    run = Dropping({0: "LOOP"}, EXTEND, group_size=1)
    run.begin()
    for size in range(1, 5):
        assert reasons(run) == {}
        run.generate(1, step=0)
        assert finalized(run)[-1] == (EXTEND if size < 4 else KEEP, ""), "four times the size of the group is the limit"
        assert run.num_extend_max == 4 - size
    values = [sample.meta.rewards[0].value for sample in run.core.state.groups["g0"].samples.values()]
    assert values == [run.reward(f"g0.{number}") + 1 for number in range(4)], "adjusted once"
    assert reasons(run) == {"filtered/LOOP": 1}
    assert [sample.meta.sample_id for sample in run.lease(1).samples] == ["g0.1.0", "g0.2.0", "g0.3.0"]
    held(run)


def test_a_drop_of_an_unknown_sample_fails_the_group_and_names_the_sample() -> None:
    run = Dropping({1: "LOOP", 7: "LOOP"})
    run.begin()
    letters: list[DeadLetter] = []
    take = run.take

    def noted(decision: Any) -> dict[int, Any]:
        letters.extend(effect for effect in decision.effects if isinstance(effect, DeadLetter))
        return take(decision)

    run.take = noted  # type: ignore[method-assign]
    run.generate(3, step=0)
    assert finalized(run) == []
    assert reasons(run) == {"failed/NOT_FINALIZED": 3}
    (letter,) = letters
    assert letter.cause == (
        "scorer: the decision drops sample 'g0.7.0', which is not a member of group g0, expected ids of its members; "
        "correct the finalizer that the reward service runs"
    )
    held(run)


def _leased(fact: f.BatchLeased) -> f.BatchLeased:
    return msgspec.structs.replace(fact, sample_ids=(*fact.sample_ids, "g0.1.0"))


def _used(fact: f.SamplesEnded) -> f.SamplesEnded:
    return msgspec.structs.replace(fact, sample_ids=("g0.0.0",))


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        (f.BatchLeased, _leased, "lease b1.1.0.0 has sample g0.1.0, which had ended as FILTERED"),
        (f.SamplesEnded, _used, "sample g0.0.0 ended as TRAINED, having ended as FILTERED"),
        (f.SamplesEnded, lambda _: None, ""),
    ],
    ids=["leased", "another", "removed"],
)
def test_the_audit_finds_a_drop_that_was_changed(kind: type, change: Any, what: str) -> None:
    run = Dropping({1: "LOOP"})
    run.begin()
    run.generate(3, step=0)
    run.checkpoint(1, run.commit(1, run.lease(1).lease_id))
    report = audit(doctored(run, kind, change))
    assert not report.holds
    assert any(what in finding.message for finding in report.findings), report.to_text()
