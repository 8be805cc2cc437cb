"""A run without a learner, by hand: samples end as exported when they are scored, and the run ends by itself."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.services.coordinator.audit import Audit
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DrawTasks
from rollmesh.services.coordinator.core.facts import Purpose, SampleEnd
from rollmesh.shared.errors import MeshError
from tests.sim.world import endless_spec

from .core_run import NAMES, CoreRun


def export(**spec: Any) -> CoreRun:
    """Three tasks, each rolled out twice."""
    run = CoreRun(**({"export_groups": 3} | spec))
    run.begin()
    return run


def failed(run: CoreRun, lease: i.EpisodeLease) -> None:
    report = i.EpisodeReport(
        lease_id=lease.lease_id,
        group=lease.group,
        episode=lease.episode,
        attempt=lease.attempt,
        outcome=m.EpisodeOutcome.INFRA_FAILURE,
        cause="the jail broke",
    )
    run.ask(i.ReportEpisodes, node_id="w", reports=(report,))


def test_every_scored_sample_is_exported_at_once_and_the_run_ends_with_the_last() -> None:
    run = export()
    run.generate(5, step=0)
    assert run.core.state.counters.ends == {SampleEnd.EXPORTED: 5}
    assert (run.core.state.counters.live, run.core.state.ended) == (1, "")
    run.generate(1, step=0)
    assert run.core.state.counters.reasons == {"exported": 6}
    assert run.core.state.ended == "EXPORTED"
    assert not run.core.state.groups
    purposes = {fact.purpose for fact in run.facts if isinstance(fact, f.GroupReserved)}
    assert purposes == {Purpose.EXPORT}


def test_the_audit_covers_it() -> None:
    run = export()
    run.generate(6, step=0)
    audit = Audit()
    for record in run.records:
        audit.enter(record)
    report = audit.report()
    assert report.holds, report.to_text()
    assert (report.samples.reserved, report.samples.exported, report.samples.live) == (6, 6, 0)


def test_no_group_is_admitted_before_weights_are_published_nor_beyond_the_requested_number() -> None:
    run = CoreRun(export_groups=3)
    run.attach()
    waiting = run.core.handle(i.AcquireRollouts(ticket=99, node_id="w", num_max=20, wait_s=0.0), run.now)
    assert [e.value.waiting_for for e in waiting.effects] == ["a published version of incarnation 0"]  # type: ignore[union-attr]
    run.publish(0)
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=20, wait_s=1.0)
    assert len(acquired.leases) == 6
    assert {lease.purpose for lease in acquired.leases} == {Purpose.EXPORT}
    assert run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=0.0).waiting_for.startswith(
        "nothing: all 3 groups"
    )


def test_an_episode_that_fails_for_good_is_counted_and_the_run_ends_without_it() -> None:
    run = export(export_groups=1, tries_max=1)
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0)
    failed(run, acquired.leases[0])
    run.generate(1, step=0)
    assert run.core.state.counters.ends == {SampleEnd.FAILED: 1, SampleEnd.EXPORTED: 1}
    assert run.core.state.ended == "EXPORTED"


def test_a_stop_keeps_what_was_exported() -> None:
    run = export()
    run.generate(3, step=0)
    run.ask(m.StopRun, reason="enough")
    assert run.core.state.counters.reasons == {"exported": 3, "cancelled/RUN_ENDED": 1}
    assert run.core.state.counters.conserved


def test_a_split_with_fewer_tasks_ends_the_run_when_those_have_ended() -> None:
    run = CoreRun(export_groups=3, group_size=1)
    run.begin()
    asked = run.core.handle(i.AcquireRollouts(ticket=7, node_id="w", num_max=2, wait_s=9.0), run.now)
    (question,) = asked.effects
    assert question == DrawTasks(Purpose.EXPORT, 0, 2, "test")
    answer = i.DrawFailed(purpose=Purpose.EXPORT, cause="split `test` has 0 tasks", exhausted=True)
    run.take(run.core.handle(answer, run.now))
    assert run.core.state.ended == "TASKS_EXHAUSTED"


def test_a_data_service_that_is_away_ends_nothing() -> None:
    run = export()
    run.core.handle(i.AcquireRollouts(ticket=7, node_id="w", num_max=2, wait_s=9.0), run.now)
    run.core.handle(i.DrawFailed(purpose=Purpose.EXPORT, cause="connection refused"), run.now)
    assert run.core.state.ended == ""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(i.LeaseBatch, {"update": 1}), (i.CommitUpdate, {"update": 1, "lease_ids": ()})],
    ids=["lease", "commit"],
)
def test_there_is_nothing_to_train_on(kind: type, fields: dict[str, Any]) -> None:
    run = export()
    with pytest.raises(MeshError) as caught:
        run.ask(kind, **NAMES, trainer_epoch=run.epoch, **fields)
    assert caught.value.reason == "NO_LEARNER"


def test_weights_published_again_by_another_process_change_nothing() -> None:
    run = export()
    run.begin()
    assert sum(isinstance(fact, f.VersionPublished) for fact in run.facts) == 1
    run.generate(6, step=0)
    assert run.core.state.ended == "EXPORTED"


@pytest.mark.parametrize("field", ["updates_max", "eval_every"])
def test_an_export_has_neither_updates_nor_evaluations(field: str) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be 0 in a run that exports .*, got 4"):
        endless_spec(export_groups=8, **{field: 4})
