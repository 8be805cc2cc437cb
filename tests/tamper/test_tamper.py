"""Every random change to a copy of a real ledger is found, and unchanged ledgers pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.world import save_model_folder
from tests.tamper.real_run import MAKERS
from tests.tamper.tamper import KINDS, tamper, untouched, untouched_archive


async def test_every_kind_of_tampering_is_found(tmp_path: Path) -> None:
    model = save_model_folder(tmp_path / "model")
    run = await MAKERS["roll-back"](tmp_path / "run", model)
    report = await untouched(run)
    assert report.holds, report.to_text()
    assert report.updates_undone > 0
    archived = await untouched_archive(run)
    assert archived.holds, archived.to_text()
    assert [head.holds for head in report.heads] == [True] * (len(run.heads) + 1), "and that of the copied checkpoint"
    assert {head.where.partition(" ")[0] for head in report.heads} == {"checkpoint", "gateway"}
    export = await MAKERS["export"](tmp_path / "export", model)
    report = await untouched(export)
    assert report.holds, report.to_text()
    assert report.payloads is not None
    assert report.payloads.compared == len(export.payloads) > 0
    tally = await tamper([run, export], num=len(KINDS), seed=1)
    assert not tally.missed, tally.table()
    assert set(tally.tried) == set(KINDS)


@pytest.mark.slow
async def test_500_tamperings_with_four_runs_are_found(tmp_path: Path) -> None:
    model = save_model_folder(tmp_path / "model")
    runs = [await make(tmp_path / name, model) for name, make in MAKERS.items()]
    for run in runs:
        report = await untouched(run)
        assert report.holds, f"{run.name}: {report.to_text()}"
    tally = await tamper(runs, num=500, seed=0)
    assert not tally.missed, tally.table()
