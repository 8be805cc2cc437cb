"""`rollmesh dead list`: many letters of one cause are one line."""

from __future__ import annotations

from rollmesh.cli.dead_letters import as_text, by_cause
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
