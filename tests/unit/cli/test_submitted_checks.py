"""What `rollmesh check` says about a configuration whose tasks come from clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.checks.config_checks import find_mistakes
from rollmesh.app.checks.config_notes import notes
from rollmesh.app.checks.task_survey import survey_tasks
from rollmesh.app.config import TrainConfig
from rollmesh.services.data.config import build_pools
from rollmesh.shared.config.loader import config_from_dict

OK: dict[str, Any] = {"submitted_tasks": True, "eval_every": 0, "batch_groups": 500, "max_staleness": 0}
TOOL = {"notes": {"profile": "python"}}


def config(run: dict[str, Any], **data: Any) -> TrainConfig:
    return config_from_dict(
        TrainConfig,
        {
            "run": OK | run,
            "data": {"source": "submitted"} | data,
            "rollout": {"agents": {"other": "single_turn"}, **({} if run else {"tools": TOOL})},
            "counts": {"inference": 0, "sandbox": 0},
            "learner": {"engine": "fake"},
        },
    )


def test_agents_and_tools_that_only_clients_name_are_no_mistake_and_no_note(tmp_path: Path) -> None:
    made = config({})
    assert find_mistakes(made, tmp_path, learner=False) == []
    remarks = notes(made, tmp_path, survey_tasks(build_pools(made.data)))
    assert not [note for note in remarks if "task" in note and "counts" not in note]


@pytest.mark.parametrize(
    ("run", "data", "key"),
    [
        ({"submitted_tasks": False}, {}, "run.submitted_tasks"),
        ({"eval_every": 5, "eval_tasks": 8}, {}, "run.eval_split"),
        ({}, {"selector": "sec"}, "data.selector"),
        ({}, {"source": {"name": "submitted", "options": {"path": "x"}}}, "data.source"),
    ],
)
def test_what_contradicts_a_source_without_tasks_is_a_mistake(
    tmp_path: Path, run: dict[str, Any], data: dict[str, Any], key: str
) -> None:
    found = find_mistakes(config(run, **data), tmp_path, learner=False)
    assert [one.metadata["key"] for one in found] == [key], found


def test_another_source_serves_the_evaluations_of_submitted_tasks(tmp_path: Path) -> None:
    made = config(
        {"eval_every": 5, "eval_tasks": 8}, source={"name": "calc", "options": {"num_train": 4, "num_test": 8}}
    )
    assert find_mistakes(made, tmp_path, learner=False) == []
