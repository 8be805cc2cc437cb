"""`rollmesh dead list`: many letters of one cause are one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollmesh.app.config import load_train_config
from rollmesh.app.dead_letters import as_text, by_cause, list_dead
from rollmesh.app.run_folder import RunFolder, origin_now
from rollmesh.mesh.run_lock import owned
from rollmesh.shared.errors import NotReady
from rollmesh.v1 import events_pb2, run_pb2, types_pb2


def letter(dead_id: int, cause: str, *, replayed: bool = False) -> run_pb2.ListedLetter:
    task = types_pb2.Task(task_id=f"t{dead_id}")
    made = events_pb2.DeadLetter(dead_id=dead_id, kind=events_pb2.DEAD_KIND_TASK, subject="e", task=task, cause=cause)
    return run_pb2.ListedLetter(letter=made, replayed=replayed)


def test_letters_are_grouped_by_cause_the_most_frequent_first() -> None:
    letters = [letter(1, "KeyError: a"), letter(2, "no strip"), letter(3, "no strip", replayed=True)]
    lines = by_cause(letters).splitlines()
    assert lines[0] == "2 task (1 replayed): no strip"
    assert lines[1].strip() == "newest: letter 3, task t3, episode e"
    assert lines[2] == "1 task: KeyError: a"
    assert len(as_text(letters).splitlines()) == 3


def test_no_letter_says_so() -> None:
    assert by_cause([]) == as_text([]) == "no dead letters"


async def test_a_run_that_a_process_executes_and_that_does_not_respond_is_reported_as_starting_or_stopping(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    folder.write(load_train_config(Path("configs/demo_small.yaml")), origin_now(["rollmesh", "train"], tmp_path))
    with owned(tmp_path), pytest.raises(NotReady, match=rf"starting or stopping \(process {os.getpid()}\)"):
        await list_dead(tmp_path)
