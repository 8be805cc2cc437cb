"""A run whose settings change: what is recorded, what is rejected, and which bound applies to which batch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.audit import Audit
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.services.coordinator.core.records import BoundPolicy
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.errors import MeshError

from .core_run import CoreRun


def change(run: CoreRun, change_id: str = "c1", **fields: Any) -> m.ChangeRunResponse:
    spec = msgspec.structs.replace(run.core.state.the_spec, **fields)
    changes = tuple(
        ConfigChange(key=f"run.{k}", old=str(getattr(run.core.state.the_spec, k)), new=str(v))
        for k, v in fields.items()
    )
    changed: m.ChangeRunResponse = run.ask(m.ChangeRun, spec=spec, changes=changes, change_id=change_id)
    return changed


def audited(run: CoreRun) -> Audit:
    audit = Audit()
    for record in run.records:
        audit.enter(record)
    return audit


def test_change_is_one_fact_and_a_repetition_none() -> None:
    run = CoreRun(updates_max=5)
    assert change(run, updates_max=9) == m.ChangeRunResponse(recorded=True, reopened=False)
    assert change(run, updates_max=9) == m.ChangeRunResponse(recorded=False, reopened=False)
    found = [fact for fact in run.facts if isinstance(fact, f.RunChanged)]
    assert [(fact.changes, fact.spec.updates_max) for fact in found] == [
        ((ConfigChange(key="run.updates_max", old="5", new="9"),), 9)
    ]
    replayed = Core()
    replayed.replay(run.facts)
    assert replayed.state == run.core.state
    report = audited(run).report()
    assert report.holds
    assert [(line.key, line.old, line.new) for line in report.changes] == [("run.updates_max", "5", "9")]
    assert "run.updates_max 5 -> 9" in report.to_text()


@pytest.mark.parametrize("name", ["seed", "batch_groups", "group_size", "beyond", "success_reward", "eval_tasks"])
def test_settings_that_the_history_depends_on_cannot_change(name: str) -> None:
    run = CoreRun()
    values: dict[str, Any] = {"beyond": BoundPolicy.MASK, "success_reward": "other"}
    with pytest.raises(MeshError, match=f"run.{name}: .* cannot change after the run began") as refused:
        change(run, "c1", **{name: values.get(name, 7)})
    assert refused.value.reason == "CHANGE_REFUSED"
    assert not [fact for fact in run.facts if isinstance(fact, f.RunChanged)]


def test_run_that_ended_at_a_limit_continues_when_it_is_raised() -> None:
    run = CoreRun(updates_max=1)
    run.begin()
    digest = run.train(1)
    run.checkpoint(1, digest)
    run.publish(1)
    assert run.core.state.ended == "UPDATES_MAX"
    assert change(run, updates_max=2).reopened
    run.attach(1, digest)
    run.publish(1)
    digest = run.train(2)
    run.checkpoint(2, digest)
    run.publish(2)
    assert run.core.state.ended == "UPDATES_MAX"
    report = audited(run).report()
    assert report.holds, report.to_text()
    assert report.updates == 2


def test_run_that_someone_stopped_stays_stopped() -> None:
    run = CoreRun(updates_max=5)
    run.ask(m.StopRun, reason="enough")
    assert not change(run, updates_max=9).reopened
    assert run.core.state.ended == "STOPPED: enough"


def test_lowered_bound_drops_what_is_beyond_it_and_never_stalls() -> None:
    run = CoreRun(max_staleness=3)
    run.begin()
    for update in (1, 2):
        run.train(update)
        run.publish(update)
    run.generate(4, step=0)  # READY for update 3 with staleness 2
    change(run, max_staleness=1)
    assert run.lease(3).lease_id == ""
    assert run.core.state.counters.reasons["stale/BEYOND_BOUND"] == 4
    run.train(3)
    report = audited(run).report()
    assert report.holds, report.to_text()


def test_batch_in_doubt_is_rolled_forward_under_the_bound_it_was_leased_under() -> None:
    run = CoreRun(max_staleness=3)
    run.begin()
    for update in (1, 2):
        digest = run.train(update)
        run.publish(update)
    samples = run.generate(4, step=0)
    run.lease(3)
    change(run, max_staleness=0)  # the trainer was killed after its checkpoint with update 3, before its commit
    attached = run.attach(3, next_digest(digest, 3, sorted(samples)))
    assert attached.resolution is m.AttachResolution.ROLLED_FORWARD
    report = audited(run).report()
    assert report.holds, report.to_text()
    assert report.lag_max == 2


def test_raised_bound_does_not_unmask_tokens_of_a_batch_that_is_out() -> None:
    run = CoreRun(max_staleness=1, beyond=BoundPolicy.MASK)
    run.begin()
    run.train(1)
    run.publish(1)
    run.train(2)
    run.publish(2)
    run.generate(4, step=1)
    batch = run.lease(3)
    assert {sample.mask_below_step for sample in batch.samples} == {0}
    change(run, max_staleness=0)
    again = run.lease(3)
    assert again == batch
    run.commit(3, batch.lease_id)
    assert run.core.state.the_clock.trained_by_staleness == {0: 8, 1: 4}


def test_a_change_that_the_caller_does_not_list_is_recorded_with_what_it_changed() -> None:
    run = CoreRun(updates_max=5)
    spec = msgspec.structs.replace(run.core.state.the_spec, max_staleness=50, updates_max=9, stall_s=2.5)
    listed = ConfigChange(key="run.updates_max", old="5", new="9")
    run.ask(m.ChangeRun, spec=spec, changes=(listed,), change_id="c1")
    (found,) = [fact for fact in run.facts if isinstance(fact, f.RunChanged)]
    assert found.changes == (
        listed,
        ConfigChange(key="run.max_staleness", old="1", new="50"),
        ConfigChange(key="run.stall_s", old="0.0", new="2.5"),
    )
    report = audited(run).report()
    assert report.holds, report.to_text()
