"""Every field of a request is checked on arrival. What passes can be applied; an error names its field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from rollmesh.services.coordinator import translate, validation
from rollmesh.services.coordinator.core.messages import EpisodeOutcome
from rollmesh.shared.errors import InvalidInput, InvalidSpec, ScorerFailed
from rollmesh.v1 import coordinator_pb2, events_pb2, reward_pb2, run_pb2, types_pb2

Change = Callable[[Any], object]
HELD: dict[str, Any] = {"run": "r", "trainer_epoch": 1}
UNKNOWN: Any = 9
"""A number that is in no enum."""
USED, DROPPED = run_pb2.SAMPLE_DISPOSITION_USED, run_pb2.SAMPLE_DISPOSITION_DROPPED


def commit(**fields: Any) -> run_pb2.CommitUpdateRequest:
    values: dict[str, Any] = HELD | {"update": 1, "lease_ids": ["b"], "outcome": run_pb2.UPDATE_OUTCOME_APPLIED}
    return run_pb2.CommitUpdateRequest(**(values | fields))


def disposed(sample_id: str, disposition: Any = USED, reason: str = "") -> run_pb2.DisposedSample:
    return run_pb2.DisposedSample(sample_id=sample_id, disposition=disposition, reason=reason)


def measured(group: str, advantage: float = 0.5, loss: float = -0.1, tokens: int = 7) -> events_pb2.TrainedGroup:
    return events_pb2.TrainedGroup(group=group, mean_abs_advantage=advantage, policy_loss=loss, num_tokens=tokens)


def by_name(old: dict[str, Any] | None = None, /, **measures: float) -> run_pb2.CommitUpdateRequest:
    return commit(groups=[events_pb2.TrainedGroup(group="a", **(old or {}), measures=measures)])


def named(name: str, value: float = 1.0) -> run_pb2.CommitUpdateRequest:
    return by_name(**{name: value})


REJECTED: list[tuple[Callable[[Any], None], Any, str]] = [
    (validation.check_trainer, run_pb2.LeaseBatchRequest(trainer_epoch=1), "run"),
    (validation.check_trainer, run_pb2.LeaseBatchRequest(run="r"), "trainer_epoch"),
    (validation.check_trainer, run_pb2.RenewBatchRequest(run="r", trainer_epoch=-1, lease_id="b"), "trainer_epoch"),
    (validation.check_trainer, run_pb2.ReleaseBatchRequest(**HELD), "lease_id"),
    (validation.check_trainer, run_pb2.ReleaseBatchRequest(**HELD, lease_id="b" * 257), "lease_id"),
    (validation.check_trainer, run_pb2.LeaseBatchRequest(**HELD, policy="a b"), "policy"),
    (validation.check_trainer, run_pb2.LeaseBatchRequest(**HELD, learner="x" * 65), "learner"),
    (validation.check_renew, coordinator_pb2.RenewLeasesRequest(lease_ids=["r/g0.0#1"]), "node_id"),
    (validation.check_attach, run_pb2.AttachTrainerRequest(run="r", last_update=-1), "last_update"),
    (validation.check_attach, run_pb2.AttachTrainerRequest(run="r", holder="x" * 257), "holder"),
    (validation.check_attach, run_pb2.AttachTrainerRequest(run="r", digest="x" * 129), "digest"),
    (validation.check_attach, run_pb2.AttachTrainerRequest(run="r", outcome=UNKNOWN), "outcome"),
    (validation.check_attach, run_pb2.AttachTrainerRequest(run="r", samples=[disposed("a"), disposed("a")]), "samples"),
    (validation.check_commit, commit(lease_ids=["b", "b"]), "lease_ids"),
    (validation.check_commit, commit(lease_ids=[""]), "lease_ids[0]"),
    (validation.check_commit, commit(update=0), "update"),
    (validation.check_commit, commit(outcome=0), "outcome"),
    (validation.check_commit, commit(samples=[disposed("a"), disposed("a", DROPPED)]), "samples"),
    (validation.check_commit, commit(samples=[disposed("a", 0)]), "samples[0].disposition"),
    (validation.check_commit, commit(samples=[disposed("a", DROPPED, "x" * 65)]), "samples[0].reason"),
    (validation.check_commit, commit(groups=[measured("a"), measured("a")]), "groups"),
    (validation.check_commit, commit(groups=[measured("")]), "groups[0].group"),
    (validation.check_commit, commit(groups=[measured("a"), measured("b" * 257)]), "groups[1].group"),
    (validation.check_commit, commit(groups=[measured("a", math.nan)]), "groups[0].mean_abs_advantage"),
    (validation.check_commit, commit(groups=[measured("a", math.inf)]), "groups[0].mean_abs_advantage"),
    (validation.check_commit, commit(groups=[measured("a", -0.1)]), "groups[0].mean_abs_advantage"),
    (validation.check_commit, commit(groups=[measured("a", loss=-math.inf)]), "groups[0].policy_loss"),
    (validation.check_commit, commit(groups=[measured("a", tokens=0)]), "groups[0].num_tokens"),
    (validation.check_commit, commit(groups=[measured("a", tokens=2**60)]), "groups[0].num_tokens"),
    (validation.check_commit, named("regret", math.nan), "groups[0].measures[regret]"),
    (validation.check_commit, named("regret", -math.inf), "groups[0].measures[regret]"),
    (validation.check_commit, named(""), "groups[0].measures"),
    (validation.check_commit, named("two words"), "groups[0].measures"),
    (validation.check_commit, named("x" * 65), "groups[0].measures"),
    (validation.check_commit, by_name(**{f"m{n}": 1.0 for n in range(17)}), "groups[0].measures"),
    (validation.check_commit, named("mean_abs_advantage", -0.1), "groups[0].measures[mean_abs_advantage]"),
    (validation.check_commit, named("num_tokens", 0.0), "groups[0].measures[num_tokens]"),
    (validation.check_commit, named("num_tokens", 1.5), "groups[0].measures[num_tokens]"),
    (validation.check_commit, named("num_tokens", math.inf), "groups[0].measures[num_tokens]"),
    (validation.check_commit, by_name({"policy_loss": 0.25}, policy_loss=0.5), "groups[0].policy_loss"),
    (validation.check_commit, by_name({"policy_loss": math.nan}, policy_loss=0.5), "groups[0].policy_loss"),
    (validation.check_commit, by_name({"num_tokens": 7}, regret=0.5), "groups[0].num_tokens"),
    (validation.check_commit, commit(groups=[measured(str(n)) for n in range(131_073)]), "groups"),
    (validation.check_commit, commit(groups=[measured("a")], outcome=run_pb2.UPDATE_OUTCOME_SKIPPED), "groups"),
    (validation.check_checkpoint, run_pb2.ReportCheckpointRequest(**HELD, update=-1), "update"),
    (validation.check_publish, run_pb2.PublishVersionRequest(**HELD), "version.weights_digest"),
    (
        validation.check_publish,
        run_pb2.PublishVersionRequest(**HELD, version=types_pb2.PolicyVersion(step=-1)),
        "version.step",
    ),
    (validation.check_change, run_pb2.ChangeRunRequest(), "change_id"),
    (validation.check_hello, coordinator_pb2.NodeHello(node_id="n", capacity=-1), "hello.capacity"),
    (validation.check_hello, coordinator_pb2.NodeHello(), "hello.node_id"),
    (validation.check_node_report, coordinator_pb2.NodeReport(num_running=-1), "report.num_running"),
]


@pytest.mark.parametrize(("check", "request_", "field"), REJECTED, ids=[f"{c.__name__}-{f}" for c, _, f in REJECTED])
def test_a_field_out_of_its_range_is_rejected_by_name(check: Callable[[Any], None], request_: Any, field: str) -> None:
    with pytest.raises(InvalidInput, match="must") as caught:
        check(request_)
    assert caught.value.violations[0].field == field
    assert len(caught.value.message) < 500


def test_a_run_that_evaluates_needs_tasks() -> None:
    spec = events_pb2.RunSpec(
        run="r", batch_groups=2, group_size=2, publish_every=1, tries_max=1, episode_lease_s=1.0, batch_lease_s=1.0, group_s_max=1.0,
        eval_s_max=1.0, eval_every=2,
    )  # fmt: skip
    with pytest.raises(InvalidSpec, match="must be >= 1 in a run that evaluates") as caught:
        translate.run_spec(spec)
    assert caught.value.violations[0].field == "spec.eval_tasks"
    spec.eval_tasks = 1
    assert translate.run_spec(spec).eval_tasks == 1


def test_a_sound_commit_passes() -> None:
    validation.check_commit(commit(samples=[disposed("a"), disposed("b", DROPPED, "TOO_LONG")]))
    validation.check_commit(commit(groups=[measured("a"), measured("b", 0.0, 3.5, 1)]))
    validation.check_commit(by_name({"num_tokens": 3}, num_tokens=3, mean_abs_advantage=0.0, regret=-2.0))
    validation.check_commit(by_name(**{"x" * 64: 1e300}, **{f"a.b:c/d-{n}": 0.0 for n in range(15)}))


# Reports --------------------------------------------------------------------------------------------------------------


def report() -> coordinator_pb2.EpisodeReport:
    reward = types_pb2.Reward(name="correct", value=1.0, segment=-1, outcome=types_pb2.REWARD_OUTCOME_OK)
    meta = types_pb2.SampleMeta(
        sample_id="g0.1-0", steps=[types_pb2.StepSpan(num_tokens=4)], num_tokens=9, rewards=[reward], trainable=True
    )
    key = types_pb2.EpisodeKey(run="r", group="g0", episode="g0.1", attempt=1)
    return coordinator_pb2.EpisodeReport(
        lease_id="r/g0.1#1",
        key=key,
        outcome=coordinator_pb2.EPISODE_OUTCOME_COMPLETED,
        payload=types_pb2.PayloadRef(sequence=1, size_bytes=9),
        samples=[meta],
    )


def add_turn(report: coordinator_pb2.EpisodeReport, **fields: Any) -> types_pb2.TurnSummary:
    return report.samples[0].summary.turns.add(**{"observation": "0123456789abcdef"} | fields)


def test_a_sound_report_passes() -> None:
    known = translate.episode_report(report())
    assert (known.invalid, known.outcome, known.lease_id) == ("", EpisodeOutcome.COMPLETED, "g0.1#1")
    assert known.samples[0].policy == "main"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: setattr(r.samples[0], "num_tokens", 2**63 - 1), "samples[0].num_tokens"),
        (lambda r: setattr(r.samples[0], "num_tokens", -1), "samples[0].num_tokens"),
        (lambda r: setattr(r.samples[0], "num_sampled_tokens", 2**63 - 1), "samples[0].num_sampled_tokens"),
        (lambda r: setattr(r.samples[0].steps[0], "num_tokens", 2**63 - 1), "samples[0].steps"),
        (lambda r: setattr(r.samples[0].steps[0], "num_tokens", 0), "samples[0].steps[0].num_tokens"),
        (lambda r: setattr(r.samples[0].steps[0], "step", -3), "samples[0].steps[0].step"),
        (lambda r: setattr(r.samples[0].steps[0], "incarnation", -1), "samples[0].steps[0].incarnation"),
        (lambda r: r.samples[0].steps.add(num_tokens=1), "samples[0].steps"),
        (lambda r: r.samples.append(r.samples[0]), "samples.sample_id"),
        (lambda r: setattr(r.samples[0], "sample_id", ""), "samples[0].sample_id"),
        (lambda r: setattr(r.samples[0], "sample_id", "g0.10-0"), "samples[0].sample_id"),
        (lambda r: setattr(r.samples[0], "sample_id", "g1.0-0"), "samples[0].sample_id"),
        (lambda r: setattr(r.samples[0], "sample_id", "g0.1-" + "x" * 1_000_000), "samples[0].sample_id"),
        (lambda r: setattr(r.samples[0], "sample_id", "g0.1-\n"), "samples[0].sample_id"),
        (lambda r: setattr(r.samples[0], "leaf", -1), "samples[0].leaf"),
        (lambda r: setattr(r.samples[0].rewards[0], "name", ""), "samples[0].rewards[0].name"),
        (lambda r: setattr(r.samples[0].rewards[0], "segment", -2), "samples[0].rewards[0].segment"),
        (lambda r: setattr(r.samples[0].rewards[0], "answer", "x" * 257), "samples[0].rewards[0].answer"),
        (lambda r: setattr(r.samples[0].summary, "finish", 99), "samples[0].summary.finish"),
        (lambda r: setattr(r.samples[0].summary, "text", "x" * 16_385), "samples[0].summary.text"),
        (lambda r: setattr(r.samples[0].summary, "role", "x" * 257), "samples[0].summary.role"),
        (lambda r: add_turn(r, observation="xyz"), "samples[0].summary.turns[0].observation"),
        (lambda r: add_turn(r, num_tokens=-1), "samples[0].summary.turns[0].num_tokens"),
        (lambda r: add_turn(r, num_tokens=1 << 40), "samples[0].summary.turns"),
        (lambda r: add_turn(r, segment=99), "samples[0].summary.turns[0].segment"),
        (lambda r: [add_turn(r), add_turn(r)], "samples[0].summary.turns[1].segment"),
        (lambda r: r.samples[0].summary.turns.add(segment=-1), "samples[0].summary.turns[0].segment"),
        (lambda r: add_turn(r, mean_logprob=math.nan), "samples[0].summary.turns[0].mean_logprob"),
        (lambda r: [add_turn(r, segment=n) for n in range(513)], "samples[0].summary.turns"),
        (lambda r: setattr(r.samples[0].rewards[0], "outcome", 0), "samples[0].rewards[0].outcome"),
        (lambda r: setattr(r.payload, "sequence", 0), "payload.sequence"),
        (lambda r: setattr(r.payload, "size_bytes", -1), "payload.size_bytes"),
        (lambda r: setattr(r, "num_tool_calls", -1), "num_tool_calls"),
        (lambda r: setattr(r, "num_tool_calls", 2**63 - 1), "num_tool_calls"),
        (lambda r: setattr(r, "num_tool_calls_failed", 1), "num_tool_calls_failed"),
        (lambda r: setattr(r, "num_tool_calls_failed", -1), "num_tool_calls_failed"),
        (lambda r: setattr(r, "outcome", 0), "outcome"),
        (lambda r: setattr(r, "outcome", 9), "outcome"),
    ],
)
def test_a_bad_report_becomes_a_failed_attempt_that_names_the_field(change: Change, field: str) -> None:
    one = report()
    change(one)
    known = translate.episode_report(one)
    assert known.invalid.startswith(f"`{field}` must")
    assert (known.outcome, known.samples) == (EpisodeOutcome.INFRA_FAILURE, ())
    assert len(known.invalid) < 500


def test_a_lease_of_another_run_is_not_this_ones() -> None:
    one = report()
    one.lease_id = "s/g0.1#1"
    assert translate.episode_report(one).lease_id == ""


def test_the_ledger_keeps_a_bounded_part_of_the_evidence() -> None:
    one = report()
    one.samples[0].rewards[0].evidence = "x" * 60_000
    assert len(translate.episode_report(one).samples[0].rewards[0].evidence) == translate.EVIDENCE_CHARS_MAX


# Decisions on groups --------------------------------------------------------------------------------------------------


def _ok(name: str = "r", value: float = 1.0, **values: Any) -> types_pb2.Reward:
    return types_pb2.Reward(name=name, value=value, outcome=types_pb2.REWARD_OUTCOME_OK, **values)


def _adjusted(*rewards: types_pb2.Reward, num: int = 1) -> dict[str, Any]:
    one = reward_pb2.SampleRewards(sample_id="a", rewards=rewards)
    return {"decision": reward_pb2.GROUP_DECISION_KEEP, "adjusted": [one] * num}


def _dropped(*members: tuple[str, str]) -> dict[str, Any]:
    dropped = [reward_pb2.DroppedMember(sample_id=name, reason=reason) for name, reason in members]
    return {"decision": reward_pb2.GROUP_DECISION_KEEP, "dropped": dropped}


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"decision": 0}, "`decision` must be KEEP, FILTER or EXTEND, got 0"),
        ({"decision": 77}, "`decision` must be KEEP, FILTER or EXTEND, got 77"),
        ({"reason": "x" * 3_000_000}, "`reason` must have at most 64 characters of A-Z"),
        ({"reason": "mean 0.1"}, "`reason` must have at most 64 characters of A-Z"),
        ({"decision": reward_pb2.GROUP_DECISION_EXTEND, "num_extend": -5}, "`num_extend` must be in [1, 49152], got -5"),
        ({"decision": reward_pb2.GROUP_DECISION_EXTEND, "num_extend": 2**31 - 1}, "`num_extend` must be in [1, 49152], got 2147483647"),
        ({"decision": reward_pb2.GROUP_DECISION_EXTEND}, "`num_extend` must be in [1, 49152], got 0"),
        (_adjusted(_ok("n" * 100_000)), "`adjusted[0].rewards[0].name` must have 1 to 64 characters"),
        (_adjusted(*[_ok()] * 10_000), "`adjusted[0].rewards` must have at most 1024 entries, got 10000"),
        (_adjusted(_ok(value=float("nan"))), "`adjusted[0].rewards[0].value` must be in [-1e+30, 1e+30], got nan"),
        (_adjusted(_ok(segment=-7)), "`adjusted[0].rewards[0].segment` must be >= -1, got -7"),
        (_adjusted(types_pb2.Reward(name="r", outcome=99)), "`adjusted[0].rewards[0].outcome` must be OK"),  # type: ignore[arg-type]
        (_adjusted(_ok(), num=2), "`adjusted` must name each once, got 'a'"),
        (_dropped(("a", "LOOP"), ("a", "LATE")), "`dropped` must name each once, got 'a'"),
        (_dropped(("", "LOOP")), "`dropped[0].sample_id` must have 1 to 256 characters, got ''"),
        (_dropped(("x" * 3_000_000, "LOOP")), "`dropped[0].sample_id` must have 1 to 256 characters"),
        (_dropped(("a", "LOOP"), ("b", "")), "`dropped[1].reason` must have 1 to 64 characters of A-Z a-z 0-9 _ . : / -, got ''"),
        (_dropped(("a", "x" * 3_000_000)), "`dropped[0].reason` must have 1 to 64 characters"),
        (_dropped(("a", "DEFERRED")), "`dropped[0].reason` must not be one of DEFERRED, VANISHED_ADVANTAGE, got 'DEFERRED'"),
        (_dropped(("a", "mean 0.1")), "`dropped[0].reason` must have 1 to 64 characters"),
    ],
)  # fmt: skip
def test_a_decision_out_of_range_is_refused_with_its_field(values: dict[str, Any], what: str) -> None:
    answer = reward_pb2.FinalizeGroupResponse(**{"decision": reward_pb2.GROUP_DECISION_FILTER, **values})
    with pytest.raises(ScorerFailed) as caught:
        translate.group_decided("g7", answer)
    assert "the finalizer's decision on group g7 is rejected" in caught.value.message
    assert what in caught.value.message
    assert len(caught.value.message) < 500


def test_the_evidence_of_adjusted_rewards_is_not_recorded() -> None:
    answer = reward_pb2.FinalizeGroupResponse(**_adjusted(_ok(evidence="e" * 5000)))
    (sample,) = translate.group_decided("g7", answer).adjusted
    assert sample.rewards[0].evidence == ""


def test_a_decision_without_drops_is_that_of_earlier_releases() -> None:
    answer = reward_pb2.FinalizeGroupResponse(**_dropped(("a", "LOOP"), ("b", "LATE")))
    assert translate.group_decided("g7", answer).dropped == {"a": "LOOP", "b": "LATE"}
    answer.ClearField("dropped")
    assert translate.group_decided("g7", answer).dropped == {}
