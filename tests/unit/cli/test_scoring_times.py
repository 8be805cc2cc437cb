"""`rollmesh check` names time limits of scoring that cannot fit into each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.checks.config_notes import notes
from rollmesh.app.checks.task_survey import survey_tasks
from rollmesh.app.config import TrainConfig
from rollmesh.services.data.config import build_pools
from rollmesh.shared.config.loader import config_from_dict


def noted(tmp_path: Path, scorer: dict[str, Any] | None = None, **sections: Any) -> list[str]:
    scorers = [{"name": "tests", "reward": "correct", **(scorer or {})}]
    settings = {
        "counts": {"sandbox": 1},
        "data": {"source": {"name": "calc"}},
        **sections,
        "reward": {"scorers": scorers, **sections.get("reward", {})},
    }
    config = config_from_dict(TrainConfig, settings)
    return notes(config, tmp_path, survey_tasks(build_pools(config.data, tmp_path)))


def test_defaults_fit(tmp_path: Path) -> None:
    assert noted(tmp_path) == []
    assert noted(tmp_path, {"timeout_s": 20, "options": {"wall_s": 5}}) == []


@pytest.mark.parametrize(
    ("scorer", "sections", "words"),
    [
        ({"timeout_s": 20}, {}, "timeout_s is 20 s, but 3 hidden tests (`time_limits_max`) may take 10 s each"),
        ({}, {"sandbox": {"profiles": {"python": {"limits": {"call_s": 11}}}}}, "may take 11 s each"),
        ({"timeout_s": 120}, {}, "may take 120 s (`reward.scorers[].timeout_s` of scorers that read each other), but rollout.stages.score_s_max is 120 s"),
        ({"timeout_s": 60}, {"reward": {"sandbox": {"judgment_s_max": 50}}}, "reward.sandbox.judgment_s_max ends a judgment after 50 s"),
    ],
)  # fmt: skip
def test_limits_that_cannot_fit_are_noted(
    tmp_path: Path, scorer: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    (note,) = noted(tmp_path, scorer, **sections)
    assert words in note
