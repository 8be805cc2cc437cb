"""Agents that are programs, under kills: a killed worker's episodes run elsewhere, its programs exit, and its keys open
nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from .plan import PROGRAM, PROGRAM_VICTIMS, Fault, draw
from .programs import JOURNAL, JournalLine, program_config
from .round import play
from .traps import Traps
from .world import save_model_folder

KILLS = (
    Fault(victim="rollout-generating", kind="kill", update=1, after=3),
    Fault(victim=PROGRAM, kind="kill", update=2),
)
UPDATES = 4


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_episodes_of_a_killed_worker_are_run_by_another_and_its_programs_exit(tmp_path: Path) -> None:
    config = program_config(
        save_model_folder(tmp_path / "model"),
        num_workers=2,
        num_per_worker=12,
        think_s=3.0,
        updates_max=UPDATES,
        batch_groups=3,
    )
    reported: list[str] = []
    outcome = await play(0, list(KILLS), config, tmp_path / "round", limit_s=360.0, tell=reported.append)
    assert not outcome.cause, (outcome.cause, reported)
    assert [injection.hit for injection in outcome.injections] == [True, True], reported
    assert (outcome.updates, outcome.updates_undone, outcome.samples["failed"]) == (UPDATES, 0, 0)
    assert outcome.samples["trained"] == sum(outcome.lags.values()) >= UPDATES * 24
    counts = outcome.programs
    assert counts is not None
    assert counts.of_killed_workers > 0
    assert min(counts.killed, counts.accepted, counts.refused_dead, counts.refused_foreign) > 0

    victim = Traps(tmp_path / "round" / "traps").victim("rollout-generating")
    lines = [
        msgspec.json.decode(line, type=JournalLine) for line in (tmp_path / "round" / JOURNAL).read_bytes().splitlines()
    ]
    ended = {(line.episode, line.pid) for line in lines if line.what != "begun"}
    begun = [line for line in lines if line.what == "begun"]
    cut = {line.episode for line in begun if line.worker == victim and (line.episode, line.pid) not in ended}
    assert cut, "the worker was killed while programs ran"
    elsewhere = {line.episode for line in begun if line.worker != victim}
    assert cut <= elsewhere


def test_rounds_with_programs_hit_workers_nodes_the_gateway_and_programs() -> None:
    faults = [fault for seed in range(15) for fault in draw(seed, num=8, updates_max=6, turn=PROGRAM_VICTIMS)]
    assert {fault.victim for fault in faults} == set(PROGRAM_VICTIMS)
    assert {fault.kind for fault in faults if fault.victim == PROGRAM} == {"kill", "pause"}
