"""What `rollmesh check` finds out about all tasks at once, and about the size of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.checks import task_survey
from rollmesh.app.checks.config_checks import find_mistakes
from rollmesh.app.checks.config_notes import notes
from rollmesh.app.checks.task_survey import PROMPTS_CHECKED, survey_tasks
from rollmesh.app.config import TrainConfig
from rollmesh.services.data.config import build_pools
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.store.records import FileRecord
from rollmesh.shared.store.row_files import RowFiles

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


def test_a_survey_has_a_task_of_each_set_of_private_extras_of_an_agent() -> None:
    task = PoolTask(task_id="t", messages=(Message(role="user", content="1+1"),))
    tasks = [
        replace(task, task_id=str(number), agent=agent, private_extras=dict.fromkeys(names, 1))
        for number, (agent, names) in enumerate([("", "a"), ("", "ab"), ("", "a"), ("x", "a"), ("", "")])
    ]
    survey = survey_tasks({Split.TRAIN: MemoryPool(tasks)})
    assert [one.task_id for one in survey.with_private_extras] == ["0", "1", "3", "4"]


FILES: dict[str, Any] = {**CONFIG, "data": {"source": {"name": "files", "options": {"path": "tasks.jsonl"}}}}


def test_tasks_of_files_are_read_in_a_sample_of_limited_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_survey, "STORED_TASKS_MAX", 10)
    monkeypatch.setattr(task_survey, "_READ_AT_ONCE", 4)
    pools = build_pools(config_from_dict(TrainConfig, FILES).data, folder)
    read = [task.task_id for task in task_survey._tasks(pools[Split.TRAIN])]
    assert len(read) == 10
    assert len(set(read)) == 10
    assert read[0] == pools[Split.TRAIN].task(0).task_id


def test_source_and_oracle_of_files_agree(folder: Path) -> None:
    (folder / "other.jsonl").write_text((folder / "tasks.jsonl").read_text().replace('"answer": "1"', '"answer": "2"'))
    found = []
    for answers in ({}, {"answer_files": {"tasks": {"path": "other.jsonl", "source": "files"}}}):
        mistakes = find_mistakes(config_from_dict(TrainConfig, {**FILES, "reward": answers}), folder)
        found.append([str(one) for one in mistakes if one.metadata.get("key") == "reward.answer_files"])
    assert found[0] == []
    (message,) = found[1]
    assert "the file `tasks` differs from the one the task came from" in message


def test_prompts_of_files_with_several_answers_are_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_survey, "REPEATED_MAX", 4)
    reads: list[Sequence[int]] = []
    rows = RowFiles.rows
    with (folder / "tasks.jsonl").open("a") as file:
        file.write('{"question": "x", "answer": "other"}\n' + '{"question": "y", "answer": "1"}\n' * 9)

    def recorded(files: RowFiles, wanted: Sequence[int], **settings: Any) -> list[FileRecord]:
        reads.append(wanted)
        return rows(files, wanted, **settings)

    monkeypatch.setattr(RowFiles, "rows", recorded)
    config = config_from_dict(TrainConfig, FILES)
    found = notes(config, folder, survey_tasks(build_pools(config.data, folder)))
    (note,) = [note for note in found if "several answers" in note]
    assert reads[-1] == [0, 100, 101]  # one read, and no other repeated prompt within the limit
    assert note.startswith("note: 1 prompts have several answers in data.source, such as that of the tasks tasks-1,")
