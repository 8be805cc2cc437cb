"""What `rollmesh check` finds out about all tasks at once, and about the size of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.checks.config_checks import find_mistakes
from rollmesh.app.checks.task_survey import PROMPTS_CHECKED, survey_tasks
from rollmesh.app.config import TrainConfig
from rollmesh.services.data.config import build_pools
from rollmesh.shared.config.loader import config_from_dict

CONFIG: dict[str, Any] = {
    "data": {"source": {"name": "jsonl", "options": {"path": "tasks.jsonl", "tools": ["calculator"]}}},
    "run": {"eval_every": 0},
    "counts": {"inference": 0, "sandbox": 0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [f'{{"question": "{"x" * number}", "answer": "1"}}' for number in range(1, 101)]
    (tmp_path / "tasks.jsonl").write_text("\n".join([*lines, lines[0]]) + "\n")
    return tmp_path


def test_a_survey_has_tools_the_longest_prompts_and_repeated_ones(folder: Path) -> None:
    tasks = survey_tasks(build_pools(config_from_dict(TrainConfig, CONFIG).data, folder))
    assert tasks.tools == {"calculator"}
    assert len(tasks.longest) == PROMPTS_CHECKED
    assert len(tasks.longest[0].messages[-1].content) == 100
    assert [len(same) for same in tasks.repeated] == [2]


def test_rewards_that_no_record_can_hold_are_a_mistake_of_the_group_size(folder: Path) -> None:
    (folder / "many.py").write_text(
        "class Many:\n"
        f"    rewards = {tuple(f'reward_{number}' for number in range(32))}\n"
        "    def __init__(self, *, options=None): ...\n"
        "    async def score(self, item): ...\n"
    )
    scorers = [{"name": "many.py:Many", "reward": "correct"}]
    found = {}
    for size in (1_000, 16_384):
        config = {
            **CONFIG,
            "run": {**CONFIG["run"], "group_size": size, "batch_groups": 1, "success_reward": "correct"},
        }
        mistakes = find_mistakes(config_from_dict(TrainConfig, {**config, "reward": {"scorers": scorers}}), folder)
        found[size] = [str(one) for one in mistakes if one.metadata.get("key") == "run.group_size"]
    assert found[1_000] == []
    (message,) = found[16_384]
    assert "16384 episodes with 33 rewards each have at least" in message
