"""Facts that contradict each other in a ledger with intact records: each is found with its record, and none ends the
audit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest

from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import ConfigChange, DroppedSample, PayloadRef, StepSpan
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.ledger import StoredRecord
from rollmesh.shared.domain.digest import next_digest

from .core_run import CoreRun
from .test_audit import audit, doctored, honest, replace, rolled_back

Change = Callable[[Any], Any]


def with_digest(fact: f.UpdateCommitted, previous: str, **changes: Any) -> f.UpdateCommitted:
    changed = replace(fact, **changes)
    return replace(changed, digest=next_digest(previous, changed.update, changed.used))


def committed(run: CoreRun, update: int) -> f.UpdateCommitted:
    return next(fact for fact in run.facts if isinstance(fact, f.UpdateCommitted) and fact.update == update)


def found(report: AuditReport, check: str, words: str) -> bool:
    return any(x.check == check and words in x.message and x.remedy for x in report.findings)


def use_one_more(fact: f.UpdateCommitted) -> f.UpdateCommitted:
    return replace(fact, used=(*fact.used, "g9.0.0"))


def leave_one_out(fact: f.UpdateCommitted) -> f.UpdateCommitted:
    return replace(fact, used=fact.used[1:])


def drop_a_foreign_sample(fact: f.UpdateCommitted) -> f.UpdateCommitted:
    return replace(fact, dropped=(DroppedSample(sample_id="g9.0.0", reason="X"),))


def steps(*spans: StepSpan, policy: str = "main") -> Change:
    return lambda fact: replace(fact, samples=(replace(fact.samples[0], steps=spans, policy=policy),))


CASES: dict[str, tuple[type, Change, str, str]] = {
    "a sample that no lease holds": (f.UpdateCommitted, use_one_more, "once", "though no lease of it contains it"),
    "a leased sample left out": (f.UpdateCommitted, leave_one_out, "once", "neither used nor dropped"),
    "a dropped foreign sample": (f.UpdateCommitted, drop_a_foreign_sample, "once", "though no lease of it contains it"),
    "measurements on a foreign group": (
        f.UpdateCommitted,
        lambda x: replace(x, groups=(f.TrainedGroup(group="g9", num_tokens=1),)),
        "once",
        "measured group g9, which no lease of it contains",
    ),
    "a lease without samples": (f.BatchLeased, lambda x: replace(x, sample_ids=()), "once", "has no samples"),
    "a lease of another update": (f.BatchLeased, lambda x: replace(x, update=7), "once", "update 7, the next one is 1"),
    "a lease of another group's sample": (
        f.BatchLeased,
        lambda x: replace(x, sample_ids=(*x.sample_ids[1:], "g9.0.0")),
        "once",
        "which no group of the lease has",
    ),
    "a lease of an epoch that never attached": (
        f.BatchLeased,
        lambda x: replace(x, trainer_epoch=7),
        "once",
        "bound to epoch 7",
    ),
    "a commit of an epoch that never attached": (
        f.UpdateCommitted,
        lambda x: replace(x, trainer_epoch=7),
        "once",
        "epoch 7, which never attached",
    ),
    "weights that no trainer published": (
        f.TrainerAttached,
        lambda x: None,
        "once",
        "published before a trainer attached",
    ),
    "epochs that are skipped": (f.TrainerAttached, lambda x: replace(x, trainer_epoch=3), "once", "after epoch 0"),
    "no attach": (f.TrainerAttached, lambda x: None, "once", "which never attached"),
    "no commit for a checkpoint": (f.CheckpointReported, lambda x: replace(x, update=10**6), "once", "update 1000000"),
    "a commit of another incarnation": (
        f.UpdateCommitted,
        lambda x: replace(x, incarnation=42),
        "bound",
        "incarnation 42, expected 0",
    ),
    "a version that was never published": (
        f.EpisodeScored,
        steps(StepSpan(step=0, incarnation=99, num_tokens=4)),
        "bound",
        "main@0.99, which was not published",
    ),
    "no publication at all": (f.VersionPublished, lambda x: None, "bound", "main@0.0, which was not published"),
    "weights of a later step": (
        f.VersionPublished,
        lambda x: replace(x, version=replace(x.version, step=5)),
        "bound",
        "main@5.0 is published, expected main@0.0",
    ),
    "a negative step": (f.EpisodeScored, steps(StepSpan(step=-3, num_tokens=4)), "bound", "main@-3.0"),
    "a policy of another learner": (
        f.EpisodeScored,
        steps(StepSpan(num_tokens=4), policy="other"),
        "bound",
        "of policy 'main' used sample",
    ),
    "more trainable tokens than tokens": (
        f.EpisodeScored,
        steps(StepSpan(num_tokens=400)),
        "bound",
        "400 trainable tokens",
    ),
    "a payload of nowhere": (
        f.EpisodeScored,
        lambda x: replace(x, payload=PayloadRef()),
        "payloads",
        "without a payload",
    ),
    "a payload of another episode": (
        f.EpisodeScored,
        lambda x: replace(x, payload=PayloadRef(sequence=2)),
        "payloads",
        "has payload 2, which belongs to an episode of record",
    ),
    "a return of no lease": (f.BatchLeased, lambda x: f.BatchReturned(lease_id="b9"), "once", "b9 is returned"),
    "an endless group": (
        f.GroupReserved,
        lambda x: replace(x, num_episodes=2**62),
        "ledger",
        f"{2**62} episodes of group",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_contradiction_is_found(case: str) -> None:
    kind, change, check, words = CASES[case]
    report = audit(doctored(honest(), kind, change))
    assert not report.holds
    assert found(report, check, words), report.to_text()


def test_the_last_update_is_checked_before_its_checkpoint() -> None:
    """Its samples are not conserved until then."""
    run = honest()
    second, last = committed(run, 2), committed(run, 3)
    forged = with_digest(last, second.digest, used=last.used[1:])
    assert found(audit(doctored(run, f.UpdateCommitted, lambda _: forged, which=2)), "once", "neither used nor dropped")
    ended = committed(run, 1).used[0]
    forged = with_digest(last, second.digest, used=(*last.used, ended))
    assert found(audit(doctored(run, f.UpdateCommitted, lambda _: forged, which=2)), "once", "though no lease")


def test_a_roll_back_to_another_update_than_the_trainer_s_is_found() -> None:
    report = audit(doctored(rolled_back(), f.RolledBack, lambda x: replace(x, to_update=2)))
    assert found(report, "bound", "updates above 2 are undone after update 3")


def test_a_batch_in_doubt_that_is_committed_is_found() -> None:
    run = honest()
    records = []
    for record in run.records:
        facts = list(record.facts)
        for at, fact in enumerate(record.facts):
            if isinstance(fact, f.BatchLeased) and fact.update == 2:
                facts.insert(at + 1, f.BatchInDoubt(lease_id=fact.lease_id, reason="LEASE_EXPIRED"))
        records.append(replace_facts(record, facts))
    assert found(audit(records), "once", "which is in doubt")


def test_a_batch_in_doubt_that_the_checkpoint_holds_is_rolled_forward() -> None:
    run = CoreRun()
    run.begin()
    run.generate(4, step=0)
    batch = run.lease(1)
    ids = [sample.meta.sample_id for sample in batch.samples]
    run.attach(1, next_digest("", 1, ids))
    report = audit(run.records)
    assert report.holds, report.to_text()
    assert report.updates == 1


def test_a_commit_of_a_fenced_epoch_is_found() -> None:
    run = CoreRun()
    run.begin()
    digest = run.train(1)
    run.publish(1)
    run.attach(1, digest)
    run.train(2)
    report = audit(doctored(run, f.UpdateCommitted, lambda x: replace(x, trainer_epoch=1), which=1))
    assert found(report, "once", "committed by epoch 1, which epoch 2 fences")


# Settings -------------------------------------------------------------------------------------------------------------


def changed(*changes: ConfigChange, **spec: Any) -> list[StoredRecord]:
    run = honest()
    assert run.core.state.spec is not None
    fact = f.RunChanged(change_id="c", changes=changes, spec=replace(run.core.state.spec, **spec))
    last = run.records[-1]
    extra = StoredRecord(position=last.position + 1, record_id="x", time_unix_s=last.time_unix_s, facts=(fact,))
    return [*run.records, extra]


LISTED = ConfigChange(key="run.max_staleness", old="1", new="50")


def test_a_change_that_the_record_lists_holds() -> None:
    report = audit(changed(LISTED, ConfigChange(key="learner.threads", old="1", new="2"), max_staleness=50))
    assert report.holds, report.to_text()
    assert [line.key for line in report.changes] == ["run.max_staleness", "learner.threads"]
    position = report.changes[0].position
    assert f"staleness     bound 50 (1 before record {position}); samples used by staleness: " in report.to_text()


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (changed(max_staleness=50), "run.max_staleness changed from 1 to 50, but the record's list"),
        (changed(replace(LISTED, new="2"), max_staleness=50), "but the record lists 1 -> 2"),
        (changed(replace(LISTED, new="{"), max_staleness=50), "but the record lists 1 -> {"),
        (changed(run="other"), "run.run changed from 'r' to 'other', and it cannot change"),
        (changed(batch_groups=9), "run.batch_groups changed from 2 to 9, and it cannot change"),
    ],
    ids=["unlisted", "other", "garbage", "name", "batch"],
)
def test_a_change_that_the_record_does_not_list_is_found(records: list[StoredRecord], words: str) -> None:
    assert found(audit(records), "ledger", words)


# Anything at all ------------------------------------------------------------------------------------------------------


def replace_facts(record: StoredRecord, facts: list[f.Fact]) -> StoredRecord:
    return StoredRecord(
        position=record.position, record_id=record.record_id, time_unix_s=record.time_unix_s, facts=tuple(facts)
    )


ODD: dict[type, list[Any]] = {
    int: [0, -1, 1, 2**62, -(2**63)],
    str: ["", "x", "g0", "b1.1.0"],
    float: [0.0, float("nan"), -1.0],
    bool: [True],
}


def test_no_contradictory_ledger_ends_the_audit() -> None:
    """Remove, repeat and move facts, and give them odd values at random."""
    rng = random.Random(1)
    for run in (honest(), rolled_back()):
        for _ in range(150):
            facts = run.facts
            at = rng.randrange(len(facts))
            match rng.randrange(4):
                case 0:
                    del facts[at]
                case 1:
                    facts.insert(rng.randrange(len(facts)), facts[at])
                case 2:
                    facts.insert(rng.randrange(len(facts)), facts.pop(at))
                case _:
                    facts[at] = _odd(facts[at], rng)
            report = audit([replace_facts(run.records[0], [fact]) for fact in facts])
            assert msgspec.json.encode(report)
            assert report.to_text()


def _odd(fact: Any, rng: random.Random) -> Any:
    names = [field.name for field in msgspec.structs.fields(fact) if not isinstance(getattr(fact, field.name), RunSpec)]
    if not names:
        return replace(fact, spec=replace_unchecked(fact.spec, max_staleness=0, publish_every=2))
    name = rng.choice(names)
    value = getattr(fact, name)
    if isinstance(value, tuple):
        return replace(fact, **{name: value * rng.choice([0, 2])})
    odd = ODD.get(type(value))
    return fact if odd is None else replace(fact, **{name: rng.choice(odd)})


def replace_unchecked(spec: RunSpec, **values: Any) -> RunSpec:
    """A spec that no coordinator accepts: eta 0 with weights published every second update."""
    made = msgspec.structs.replace(spec)
    for name, value in values.items():
        msgspec.structs.force_setattr(made, name, value)
    return made


def test_every_fact_may_come_first() -> None:
    for kind in get_args(f.Fact):
        fields: dict[str, Any] = {field.name: "x" for field in msgspec.structs.fields(kind) if field.required}
        odd = {
            "spec": RunSpec(run="r"),
            "purpose": f.Purpose.TRAIN,
            "end": f.SampleEnd.STALE,
            "decision": f.GroupDecision.KEEP,
        }
        fields |= {name: odd[name] for name in fields if name in odd}
        if kind in (f.VersionPublished, f.VersionQuarantined):
            continue
        report = audit([StoredRecord(position=1, record_id="d1", time_unix_s=0.0, facts=(kind(**fields),))])
        assert report.num_records == 1
