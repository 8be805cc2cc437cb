"""Finalizers in a user's file drop members of every group: no update uses them, and every account has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.app.views.causes import no_update_text
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.coordinator.audit_history import sample_history
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import GroupDecision, SampleEnd
from rollmesh.shared.config.registry import Extension
from tests.chaos.world import mesh_config, save_model_folder

from .test_mesh import Operator

DROP = """
from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Verdict


class DropLast(Finalizer):
    def decide(self, group):
        return Verdict(decision=FinalizerDecision.KEEP, dropped={group.members[-1].sample_id: "LAST"})


class DropAll(Finalizer):
    def decide(self, group):
        first, *others = group.members
        dropped = {first.sample_id: "FIRST"} | {member.sample_id: "OTHER" for member in others}
        return Verdict(decision=FinalizerDecision.KEEP, dropped=dropped)


class FilterSmall(Finalizer):
    def decide(self, group):
        if (len(group.members), len(group.dropped)) != (2, 1):
            return Verdict(decision=FinalizerDecision.FILTER, reason="SMALL")
        return Verdict(decision=FinalizerDecision.KEEP)
"""


def config(folder: Path, *finalizers: str, **run: Any) -> MeshConfig:
    (folder / "drop.py").write_text(DROP)
    made = mesh_config(save_model_folder(folder / "model"), batch_groups=2, group_size=3, **run)
    chosen = tuple(Extension(f"{folder / 'drop.py'}:{name}") for name in finalizers)
    return msgspec.structs.replace(made, reward=msgspec.structs.replace(made.reward, finalizers=chosen))


async def test_dropped_members_are_counted_and_not_trained(tmp_path: Path) -> None:
    made = config(tmp_path, "DropLast", "FilterSmall", updates_max=3)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        report, records, counts = await operator.audit(), await operator.records(), (await operator.state()).samples
    assert report.holds, report.to_text()
    facts = [fact for record in records for fact in record.facts]
    decided = [fact for fact in facts if isinstance(fact, f.GroupFinalized)]
    assert {(fact.decision, fact.reason) for fact in decided} == {(GroupDecision.KEEP, "")}
    dropped = [
        name for fact in facts if isinstance(fact, f.SamplesEnded) and fact.reason == "LAST" for name in fact.sample_ids
    ]
    leased = {name for fact in facts if isinstance(fact, f.BatchLeased) for name in fact.sample_ids}
    assert len(dropped) == len(decided) >= 6
    assert not leased & set(dropped)
    assert {fact.end for fact in facts if isinstance(fact, f.SamplesEnded) and fact.reason == "LAST"} == {
        SampleEnd.FILTERED
    }
    assert counts.filtered == counts.reasons["filtered/LAST"] == len(dropped)
    assert (counts.trained, counts.live) == (3 * 2 * 2, 0)
    ends = counts.trained + counts.stale + counts.filtered + counts.failed + counts.cancelled + counts.exported
    assert counts.reserved == ends
    history = [line.what for line in sample_history(records, dropped[0])]
    assert history[-2:] == ["ended: filtered LAST", "its group was decided on: keep"]


async def test_a_run_whose_members_are_all_dropped_says_by_which_reasons(tmp_path: Path) -> None:
    async with Mesh(config(tmp_path, "DropAll", "FilterSmall"), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        state = await operator.until(lambda s: s.samples.filtered >= 30)
        facts = await operator.facts()
    assert {(fact.decision, fact.reason) for fact in facts if isinstance(fact, f.GroupFinalized)} == {
        (GroupDecision.FILTER, "OTHER")
    }
    reasons = state.samples.reasons
    assert reasons["filtered/OTHER"] == 2 * reasons["filtered/FIRST"] == pytest.approx(2 * state.samples.filtered / 3)
    text = no_update_text(0, reasons, state.recent)
    others, first = reasons["filtered/OTHER"], reasons["filtered/FIRST"]
    assert f"samples ended: {others} OTHER, {first} FIRST;" in text
