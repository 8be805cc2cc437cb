"""Oracles: answer keys, and errors that name the disagreement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.services.reward.oracles import AnswerFileConfig, JsonlOracle, Oracles
from rollmesh.shared.errors import ConfigError, UnknownOracle
from rollmesh.shared.store.jsonl import RecordError, read_jsonl


def answers(tmp_path: Path, *lines: object, **settings: str) -> tuple[Oracles, str]:
    """Return oracles over a file, and the head of a reference to it."""
    path = tmp_path / "key.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    digest = read_jsonl(path, num_lines_max=1000).digest
    config = AnswerFileConfig(path=str(path), **settings)  # type: ignore[arg-type]
    return Oracles({"jsonl": JsonlOracle({"mine": config})}), f"jsonl:mine@{digest[:16]}"


def test_jsonl_gives_the_line_and_what_the_pattern_finds(tmp_path: Path) -> None:
    lines = [{"answer": "#### 1"}, {"answer": "2 #### 3 #### 4"}]
    oracles, head = answers(tmp_path, *lines, answer_pattern=r"#### (\S+)")
    key = oracles.resolve(f"{head}#2")
    assert key is not None
    assert key.answers == ("4",)
    assert key.record == lines[1]


def test_jsonl_takes_a_list_of_accepted_answers(tmp_path: Path) -> None:
    oracles, head = answers(tmp_path, {"meta": {"gold": ["4", "four "]}}, answer="meta.gold")
    key = oracles.resolve(f"{head}#1")
    assert key is not None
    assert key.answers == ("4", "four")


def test_an_empty_reference_has_no_key() -> None:
    assert Oracles({}).resolve("") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: f"{head}#2", "no task on line '2'"),
        (lambda head: f"{head}#x", "no task on line 'x'"),
        (lambda head: head, "no task on line ''"),
        (lambda head: "jsonl:mine@0123456789abcdef#1", "differs from the one the task came from"),
        (lambda head: "jsonl:mine#1", "no answer file `mine#1`|differs"),
        (lambda head: "jsonl:other@00#1", "no answer file `other` is configured"),
        (
            lambda head: "riddle:1",
            "the scheme `riddle` is unknown; known: jsonl, submitted, tests, masked, calc, code, sql; name its oracle in reward.oracles",
        ),
    ],
)
def test_a_reference_that_does_not_resolve_says_what_disagrees(tmp_path: Path, change: object, message: str) -> None:
    oracles, head = answers(tmp_path, {"answer": "Zanzibar"})
    assert callable(change)
    with pytest.raises(UnknownOracle, match=message) as caught:
        oracles.resolve(change(head))
    assert "Zanzibar" not in str(caught.value)


def test_a_malformed_answer_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r'key.jsonl:2: field "answer": is missing'):
        answers(tmp_path, {"answer": "1"}, {"question": "q"})


def test_a_missing_answer_file_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot read nowhere.jsonl"):
        JsonlOracle({"mine": AnswerFileConfig(path="nowhere.jsonl")})
