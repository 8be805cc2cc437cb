"""A short round with the fake engine; and a round with a violated guarantee fails with the cause."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import pytest

from rollmesh.app.config import TrainConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.process.process_launch import bound_to_parent

from .plan import MOMENTS, SERVER, SERVICES, SUPERVISOR, Fault, draw
from .processes import gone_after, marked
from .round import Outcome, play
from .table import by_victim, to_text, totals
from .train_command import ALL_GONE_S_MAX
from .world import as_train_config, mesh_config, save_model_folder, with_replay

ENGINE = "tests.chaos.engine:TrappedEngine"
SHORT = (
    Fault(victim="learner-committed", kind="kill", update=1),
    Fault(victim=SERVER, kind="kill", update=3),
    Fault(victim="coordinator", kind="pause", update=3, pause_s=1.0),
    Fault(victim=SUPERVISOR, kind="kill", update=5),
)
UPDATES = 8


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return as_train_config(mesh_config(save_model_folder(tmp_path / "model"), engine=ENGINE, updates_max=UPDATES))


@pytest.mark.slow  # `make suite NAME=chaos` runs such rounds
@pytest.mark.timeout(300)
@pytest.mark.parametrize("replays", [False, True])
async def test_a_run_is_trained_and_audited_whichever_process_is_killed(
    tmp_path: Path, config: TrainConfig, replays: bool
) -> None:
    config = with_replay(config) if replays else config
    reported: list[str] = []
    outcome = await play(7, list(SHORT), config, tmp_path / "round", limit_s=240.0, tell=reported.append)
    assert not outcome.cause, (outcome.cause, reported)
    assert [injection.hit for injection in outcome.injections] == [True] * len(SHORT), reported
    assert outcome.num_starts == 2
    assert outcome.gone_s[0] < ALL_GONE_S_MAX
    assert outcome.updates == UPDATES
    assert outcome.updates_undone >= 1, "the learner was killed with an update in no checkpoint"
    assert outcome.samples["trained"] == sum(outcome.lags.values()) > 0.9 * UPDATES * (32 if replays else 64)
    assert totals([outcome])["held"] == 1
    assert by_victim([outcome])["supervisor"] == {"kill, any time": 1}


@pytest.mark.timeout(120)
async def test_a_round_that_fails_keeps_its_folder_and_says_why(tmp_path: Path, config: TrainConfig) -> None:
    config = msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, engine=Extension("nowhere:at_all"))
    )
    folder = tmp_path / "round"
    outcome = await play(0, list(SHORT), config, folder, limit_s=100.0, tell=lambda _: None)
    assert "ended with exit code 2" in outcome.cause
    assert not any(injection.hit for injection in outcome.injections)
    assert "nowhere" in (folder / "failure.txt").read_text(), "the command's own words"
    assert f"NO: {outcome.cause} ({folder})" in to_text([outcome])


async def test_what_is_left_is_found_by_its_environment_and_known_again() -> None:
    mark = f"ROLLMESH_LEFT_OVER={os.getpid()}"
    name, _, value = mark.partition("=")
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = await asyncio.create_subprocess_exec(*bound_to_parent(sleep), env={**os.environ, name: value})
    try:
        (found,) = marked(mark)
        assert found.pid == process.pid
        _, left = await gone_after([found], 0.0)
        assert left == [found]
    finally:
        process.kill()
        await process.wait()
    assert not found.alive
    assert not marked(mark)


def test_a_round_is_drawn_from_its_seed_alone_and_its_faults_come_before_the_end() -> None:
    for seed in range(200):
        faults = draw(seed, num=4, updates_max=9)
        assert faults == draw(seed, num=4, updates_max=9)
        assert len(faults) == 4
        assert [fault.update for fault in faults] == sorted(fault.update for fault in faults)
        assert 0 <= faults[0].update <= faults[-1].update < 8
        assert all(0.5 <= fault.pause_s <= 9.0 for fault in faults if fault.kind == "pause")
    assert draw(1, num=4, updates_max=9) != draw(2, num=4, updates_max=9)


def test_forty_rounds_spare_no_process() -> None:
    victims = {fault.victim for seed in range(40) for fault in draw(seed, num=4, updates_max=9)}
    assert victims == {SUPERVISOR, SERVER, *SERVICES, *MOMENTS}
    assert {fault.kind for seed in range(40) for fault in draw(seed, num=4, updates_max=9)} == {"kill", "pause"}


def test_a_table_has_a_line_for_each_round() -> None:
    held = Outcome(seed=3, folder="/tmp/3", seconds=20.0, num_starts=1, updates=9, samples={"trained": 288})
    text = to_text([held, Outcome(seed=4, folder="/tmp/4", cause="RoundFailed: left over: 17 (sleep)")])
    assert "| 3 | 0 | 1 | 0 | 288 |" in text
    assert "NO: RoundFailed: left over: 17 (sleep) (/tmp/4)" in text
