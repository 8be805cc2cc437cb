"""The audit passes for the core's decisions, and fails for every changed ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.audit import Audit, audit_run
from rollmesh.services.coordinator.audit_checkpoint import open_checkpoint
from rollmesh.services.coordinator.audit_history import sample_history
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import SampleEnd, StepSpan
from rollmesh.services.coordinator.core.records import BoundPolicy
from rollmesh.services.coordinator.ledger import StoredRecord
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.checkpoint_files import CheckpointMeta
from rollmesh.trainer.trained_log import TrainedLog
from tests.tamper.ledger_copy import made, store

from .core_run import CoreRun

replace = msgspec.structs.replace


def audit(records: Sequence[StoredRecord], checkpoint: Path | None = None) -> AuditReport:
    found = Audit()
    for record in records:
        found.enter(record)
    with nullcontext() if checkpoint is None else open_checkpoint(checkpoint) as opened:
        return found.report(opened)


def honest() -> CoreRun:
    """Two updates with checkpoints, a third committed, some samples in progress."""
    run = CoreRun()
    run.begin()
    for update in (1, 2):
        digest = run.train(update)
        run.checkpoint(update, digest)
        run.publish(update)
    run.train(3)
    run.publish(3)
    run.generate(3, step=3)
    return run


def rolled_back() -> CoreRun:
    """Rolls back from update 3 to 1, and continues to update 3 in incarnation 1."""
    run = CoreRun()
    run.begin()
    first = run.train(1)
    run.checkpoint(1, first)
    run.publish(1)
    second = run.train(2)
    run.publish(2)
    run.checkpoint(2, second)
    run.train(3)
    run.attach(1, first)
    run.publish(1, incarnation=1)
    run.train(2, incarnation=1)
    run.publish(2, incarnation=1)
    run.train(3, incarnation=1)
    return run


def doctored(run: CoreRun, kind: type, change: Callable[[Any], Any], which: int = 0) -> list[StoredRecord]:
    """Return the run's records with the `which`-th fact of a kind changed, or removed (None)."""
    seen = -1
    records = []
    for record in run.records:
        facts: list[f.Fact] = []
        for fact in record.facts:
            seen += isinstance(fact, kind)
            changed = change(fact) if isinstance(fact, kind) and seen == which else fact
            facts += [changed] if changed is not None else []
        records.append(
            StoredRecord(
                position=record.position, record_id=record.record_id, time_unix_s=record.time_unix_s, facts=tuple(facts)
            )
        )
    return records


def broken(report: AuditReport) -> set[str]:
    return {finding.check for finding in report.findings}


@pytest.mark.parametrize("make", [honest, rolled_back])
def test_what_the_core_decides_holds(make: Callable[[], CoreRun]) -> None:
    run = make()
    report = audit(run.records)
    assert report.holds, report.to_text()
    assert report.lag_max == 0
    assert report.digest == run.core.state.the_clock.digest
    assert report.samples.reserved == run.core.state.counters.reserved


def test_a_used_sample_without_tokens_of_the_policy_has_no_staleness() -> None:
    def given(fact: f.EpisodeScored) -> f.EpisodeScored:
        return replace(fact, samples=(replace(fact.samples[0], steps=()), *fact.samples[1:]))

    whole, report = audit(honest().records), audit(doctored(honest(), f.EpisodeScored, given))
    assert report.holds, report.to_text()
    assert report.lags == {-1: 1, 0: whole.lags[0] - 1}
    assert f"used by staleness: 0: {whole.lags[0] - 1}; without tokens of the policy: 1\n" in report.to_text()


def test_an_undone_checkpoint_voids_its_samples_and_the_rest_returns_to_be_used_once() -> None:
    report = audit(rolled_back().records)
    assert report.updates == 3
    assert report.updates_undone == 2
    assert report.samples.stale >= 4, "samples of update 2 were TRAINED when it was undone"
    assert "every claim holds" in report.to_text()


def test_a_sample_used_twice_is_found() -> None:
    run = honest()
    first = next(fact for fact in run.facts if isinstance(fact, f.UpdateCommitted))

    def again(fact: f.UpdateCommitted) -> f.UpdateCommitted:
        used = (*fact.used, first.used[0])
        return replace(fact, used=used, digest=next_digest(first.digest, 2, used))

    report = audit(doctored(run, f.UpdateCommitted, again, which=1))
    assert not report.holds
    assert any(x.check == "once" and first.used[0] in x.message for x in report.findings)


@pytest.mark.parametrize("beyond", list(BoundPolicy))
def test_a_lag_above_eta_is_found(beyond: BoundPolicy) -> None:
    run = CoreRun(beyond=beyond)
    run.begin()
    for update in (1, 2, 3):
        run.train(update)
        run.publish(update)

    def age(fact: f.EpisodeScored) -> f.EpisodeScored:
        return replace(fact, samples=(replace(fact.samples[0], steps=(StepSpan(step=0, num_tokens=4),)),))

    report = audit(doctored(run, f.EpisodeScored, age, which=10))
    assert "bound" in broken(report)
    assert any("bound 1" in x.message for x in report.findings)
    if beyond is BoundPolicy.DROP:
        assert report.lag_max == 2


@pytest.mark.parametrize("step", [3, 7])
def test_a_sample_of_weights_not_yet_made_is_found(step: int) -> None:
    def future(fact: f.EpisodeScored) -> f.EpisodeScored:
        return replace(fact, samples=(replace(fact.samples[0], steps=(StepSpan(step=step, num_tokens=4),)),))

    assert "bound" in broken(audit(doctored(honest(), f.EpisodeScored, future)))


def test_a_sample_of_a_void_step_is_found() -> None:
    def void(fact: f.EpisodeScored) -> f.EpisodeScored:
        return replace(fact, samples=(replace(fact.samples[0], steps=(StepSpan(step=2, num_tokens=4),)),))

    report = audit(doctored(rolled_back(), f.EpisodeScored, void, which=19))
    assert any("void step 2.0" in x.message for x in report.findings), report.to_text()


def test_masked_tokens_do_not_count_for_the_lag_but_one_must_remain() -> None:
    run = CoreRun(beyond=BoundPolicy.MASK)
    run.begin()
    for update in (1, 2, 3):
        run.train(update)
        run.publish(update)

    def mix(fact: f.EpisodeScored) -> f.EpisodeScored:
        spans = (StepSpan(step=0, num_tokens=2), StepSpan(step=2, num_tokens=2))
        return replace(fact, samples=(replace(fact.samples[0], steps=spans),))

    assert audit(doctored(run, f.EpisodeScored, mix, which=10)).holds


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        (f.EpisodeScored, 0),
        (f.GroupReserved, 1),
        (f.UpdateCommitted, 1),
        (f.BatchLeased, 0),
        (f.RunCreated, 0),
        (f.GroupFinalized, 2),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else str(v),
)
def test_a_lost_fact_is_found(kind: type, which: int) -> None:
    assert not audit(doctored(honest(), kind, lambda _: None, which=which)).holds


def test_a_lost_sample_is_found_by_the_second_books() -> None:
    """One of two samples of an episode is missing, although every single fact passes the fold."""
    run = honest()

    def lose(fact: f.CheckpointReported) -> None:
        return None

    def shrink(fact: f.UpdateCommitted) -> f.UpdateCommitted:
        used = fact.used[:-1]
        return replace(fact, used=used, digest=next_digest("", 1, used))

    report = audit(doctored(run, f.UpdateCommitted, shrink))
    assert "conservation" in broken(report)
    assert audit(doctored(run, f.CheckpointReported, lose)).holds, (
        "a checkpoint without a report is not a contradiction"
    )


def test_a_sample_that_ends_twice_is_found() -> None:
    run = honest()
    ended = next(fact for fact in run.facts if isinstance(fact, f.UpdateCommitted)).used[0]
    group = ended.split(".")[0]
    fact = f.SamplesEnded(group=group, sample_ids=(ended,), end=SampleEnd.STALE, reason="BEYOND_BOUND")
    extra = StoredRecord(position=len(run.records) + 1, record_id="x", time_unix_s=0.0, facts=(fact,))
    report = audit([*run.records, extra])
    assert any(f"sample {ended} ended as STALE, but" in x.message for x in report.findings)


def test_a_broken_digest_is_found() -> None:
    report = audit(doctored(honest(), f.UpdateCommitted, lambda fact: replace(fact, digest="0" * 64)))
    assert "digest" in broken(report)


def test_a_skipped_update_that_used_samples_is_found() -> None:
    report = audit(doctored(honest(), f.UpdateCommitted, lambda fact: replace(fact, applied=False)))
    assert "once" in broken(report)


# The trainer's own list -----------------------------------------------------------------------------------------------


def write_list(path: Path, updates: Sequence[Sequence[str]], **changes: Any) -> Path:
    """Write a checkpoint of these updates: the files that the audit reads. `changes`: other values in rollmesh.json."""
    log = TrainedLog()
    for number, ids in enumerate(updates, start=1):
        log.append(number, ids, incarnation=0, outcome="APPLIED")
    path.mkdir(parents=True)
    log.write_to(path / "trained.jsonl")
    values: dict[str, Any] = {"update": log.update, "digest": log.digest}
    (path / "rollmesh.json").write_bytes(msgspec.json.encode(CheckpointMeta(**(values | changes))))
    return path


def used(run: CoreRun) -> list[tuple[str, ...]]:
    return [fact.used for fact in run.facts if isinstance(fact, f.UpdateCommitted)]


def test_the_checkpoint_may_be_older_than_the_ledger(tmp_path: Path) -> None:
    run = honest()
    report = audit(run.records, write_list(tmp_path / "c", used(run)[:2]))
    assert report.holds, report.to_text()
    assert report.checkpoint is not None
    assert (report.checkpoint.updates, report.checkpoint.samples) == (2, 8)


def test_the_newest_checkpoint_of_a_folder_is_taken(tmp_path: Path) -> None:
    run = honest()
    write_list(tmp_path / "update-00000001.0", used(run)[:1])
    write_list(tmp_path / "update-00000003.0", used(run))
    report = audit(run.records, tmp_path)
    assert report.checkpoint is not None
    assert report.checkpoint.updates == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda u: [u[0][1:], *u[1:]], "the checkpoint does not list it"),
        (lambda u: [(*u[0], "foreign"), *u[1:]], "trained on sample foreign"),
        (lambda u: [u[0], (*u[1], u[0][0]), u[2]], "trained twice"),
        (lambda u: [*u, ("x",)], "contains update 4, the ledger ends at 3"),
    ],
    ids=["missing", "foreign", "twice", "ahead"],
)
def test_a_list_that_differs_from_the_ledger_is_found(tmp_path: Path, change: Any, message: str) -> None:
    run = honest()
    report = audit(run.records, write_list(tmp_path / "c", change(used(run))))
    assert broken(report) == {"checkpoint"}
    assert any(message in x.message for x in report.findings), report.to_text()


def test_a_list_one_update_ahead_is_fine_if_its_batch_is_out(tmp_path: Path) -> None:
    run = honest()
    run.generate(1, step=3)
    batch = run.lease(4)
    ids = [sample.meta.sample_id for sample in batch.samples]
    assert ids
    assert audit(run.records, write_list(tmp_path / "c", [*used(run), ids])).holds


def test_a_list_with_a_broken_chain_is_found(tmp_path: Path) -> None:
    run = honest()
    path = write_list(tmp_path / "c", used(run)) / "trained.jsonl"
    path.write_text(path.read_text().replace('"update":2', '"update":5'))
    assert broken(audit(run.records, tmp_path / "c")) == {"checkpoint"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "0" * 64}, f"the digest after update 3 is '{'0' * 64}', '"),
        ({"update": 2}, "the digest after update 2 is"),
        ({"update": 7}, "the checkpoint is of update 7, the ledger ends at 3"),
        ({"update": 0, "digest": ""}, "update 0 with digest '', trained.jsonl ends with update 3"),
        ({"incarnation": 4}, "update 3 of incarnation 4, the folder is update-00000003.0"),
        ({"policy": "other"}, "the weights are of policy 'other', the run trains 'main'"),
        ({"files": {"trained.jsonl": "0" * 64}}, "the SHA-256 of trained.jsonl is not the recorded one"),
    ],
    ids=str,
)
def test_a_position_that_differs_from_the_ledger_is_found(tmp_path: Path, changes: Any, message: str) -> None:
    run = honest()
    report = audit(run.records, write_list(tmp_path / "update-00000003.0", used(run), **changes))
    assert broken(report) == {"checkpoint"}
    assert any(message in x.message for x in report.findings), report.to_text()


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'{"update": "x"}'], ids=repr)
def test_a_checkpoint_without_a_readable_position_is_found(tmp_path: Path, content: bytes | None) -> None:
    run = honest()
    path = write_list(tmp_path / "c", used(run)) / "rollmesh.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    report = audit(run.records, tmp_path / "c")
    assert broken(report) == {"checkpoint"}
    assert "rollmesh.json cannot be read: " in report.to_text()


@pytest.mark.parametrize(("old", "new"), [('"APPLIED"', '"SKIPPED"'), ('"incarnation":0', '"incarnation":1')])
def test_another_outcome_or_incarnation_in_the_list_is_found(tmp_path: Path, old: str, new: str) -> None:
    run = honest()
    path = write_list(tmp_path / "c", used(run)) / "trained.jsonl"
    path.write_text(path.read_text().replace(old, new, 1))
    report = audit(run.records, tmp_path / "c")
    assert broken(report) == {"checkpoint"}
    assert "update 1 of the checkpoint is" in report.to_text()


async def test_the_ledger_of_another_run_is_found_without_a_head() -> None:
    bus = await store(made(record.facts for record in honest().records), run="mine")
    report = await audit_run(bus, "mine")
    assert broken(report) == {"ledger"}
    assert report.run == "mine"
    assert "this is the ledger of run 'r', expected that of run 'mine'" in report.to_text()


def test_a_folder_without_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no trained\.jsonl"):
        audit(honest().records, tmp_path)


# Stories and the report -----------------------------------------------------------------------------------------------


def test_the_history_of_a_sample_covers_admission_to_end() -> None:
    run = honest()
    sample = used(run)[0][0]
    lines = [line.what for line in sample_history(run.records, sample)]
    assert [what.split(" ")[0] for what in lines] == [
        "group",
        "attempt",
        "scored:",
        "its",
        "leased",
        "used",
        "trained:",
    ]
    assert "4 tokens of step 0.0" in lines[2]


def test_the_history_of_an_undone_sample_names_the_roll_back() -> None:
    run = rolled_back()
    undone = next(fact for fact in run.facts if isinstance(fact, f.UpdateCommitted) and fact.update == 2).used[0]
    assert sample_history(run.records, undone)[-1].what == "update undone by a roll-back to 1: stale"


def test_an_unknown_sample_has_no_history() -> None:
    assert sample_history(honest().records, "unknown") == []


def test_the_report_is_json_that_reads_back() -> None:
    report = audit(doctored(honest(), f.UpdateCommitted, lambda fact: replace(fact, digest="0" * 64)))
    assert msgspec.json.decode(msgspec.json.encode(report), type=AuditReport) == report
    assert "CLAIMS ARE BROKEN" in report.to_text()
    assert "digest        BROKEN" in report.to_text()
