"""Oracles: answer keys, and errors that name the disagreement."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.services.reward.oracles import AnswerFileConfig, JsonlOracle, Oracles, file_oracles
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError, UnknownOracle
from rollmesh.shared.store.jsonl import read_jsonl
from rollmesh.shared.store.records import RecordError
from rollmesh.shared.store.row_files import RowFiles, open_rows


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


def stored_answers(tmp_path: Path, *rows: dict[str, object], **settings: str) -> tuple[Oracles, str]:
    """Return oracles over two Parquet files, and the head of a reference to them."""
    for number in range(2):
        pq.write_table(pa.Table.from_pylist(list(rows[number::2])), tmp_path / f"key-{number}.parquet")
    config = AnswerFileConfig(path=("key-*.parquet",), source="files", **settings)  # type: ignore[arg-type]
    oracles = Oracles(dict(file_oracles({"mine": config}, tmp_path)))
    return oracles, f"files:mine@{open_rows(config.paths, base_dir=tmp_path).digest[:16]}"


def test_files_give_the_row_with_all_columns_and_what_the_pattern_finds(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"answer": f"2 #### {n}", "more": [n], "tests": "calc/sum"} for n in range(6)]
    oracles, head = stored_answers(tmp_path, *rows, answer_pattern=r"#### (\S+)", tests="tests")
    key = oracles.resolve(f"{head}#5")  # row 2 of the second file
    assert key is not None
    assert (key.answers, key.record, key.tests) == (("3",), rows[3], "calc/sum")
    assert oracles.blocks(f"{head}#5")
    assert not oracles.blocks("")
    assert not oracles.blocks("tests:calc/sum")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{head}#3", "no task on row '3'"),
        ("{head}#0", "no task on row '0'"),
        ("{head}#x", "no task on row 'x'"),
        ("{head}#" + "9" * 5000, "no task on row '9999"),
        ("files:mine@0123456789abcdef#1", "differs from the one the task came from"),
        ("files:other@00#1", "no answer file `other` is configured"),
        ("jsonl:mine@00#1", "no answer file `mine` is configured"),
    ],
)
def test_a_reference_to_files_that_does_not_resolve_says_what_disagrees(
    tmp_path: Path, reference: str, message: str
) -> None:
    oracles, head = stored_answers(tmp_path, {"answer": "Zanzibar"}, {"answer": "Zanzibar"})
    with pytest.raises(UnknownOracle, match=message) as caught:
        oracles.resolve(reference.format(head=head))
    assert "Zanzibar" not in str(caught.value)


def test_a_malformed_answer_of_files_is_named_when_it_is_read(tmp_path: Path) -> None:
    oracles, head = stored_answers(tmp_path, {"answer": "1"}, {"answer": "1"}, {"answer": None})
    with pytest.raises(RecordError, match=r'key-0.parquet:2: field "answer": must be a string or a number, got null'):
        oracles.resolve(f"{head}#2")


def test_a_key_that_many_episodes_need_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of_both: list[dict[str, object]] = [{"answer": str(n)} for n in range(6)]
    oracles, head = stored_answers(tmp_path, *rows_of_both)
    read: list[int] = []
    rows = RowFiles.rows
    monkeypatch.setattr(RowFiles, "rows", lambda files, wanted: [*rows(files, wanted), *map(read.append, wanted)][:1])
    for number in (1, 2, 1, 1):
        key = oracles.resolve(f"{head}#{number}")
        assert key is not None
        assert key.answers == (str([0, 2][number - 1]),)
    assert read == [0, 1]


def test_a_manifest_in_a_table_is_json_text(tmp_path: Path) -> None:
    manifest: dict[str, object] = {"kind": "function", "tests": [{"arguments": {"x": None}, "expected": None}]}
    oracles, head = stored_answers(tmp_path, {"tests": json.dumps(manifest)}, answer="", tests="tests")
    key = oracles.resolve(f"{head}#1")
    assert key is not None
    assert key.tests == manifest
    for wrong, message in ((manifest, "must be JSON text, because a struct"), ("{oops", "begins with { but is not")):
        oracles, head = stored_answers(tmp_path, {"tests": wrong}, answer="", tests="tests")
        with pytest.raises(RecordError, match=rf'key-0.parquet:1: field "tests": {message}'):
            oracles.resolve(f"{head}#1")


@pytest.mark.parametrize("path", ["", [], [""]])
def test_answer_files_need_a_path(path: object) -> None:
    with pytest.raises(ConfigError, match="path"):
        config_from_dict(AnswerFileConfig, {"path": path, "source": "files"})


def test_several_files_are_a_source_of_files_only() -> None:
    with pytest.raises(ValueError, match=r"`path` must be one file for the source jsonl, got \['a', 'b'\]"):
        AnswerFileConfig(path=("a", "b"))


def test_a_malformed_answer_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r'key.jsonl:2: field "answer": is missing'):
        answers(tmp_path, {"answer": "1"}, {"question": "q"})


def test_a_missing_answer_file_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot read nowhere.jsonl"):
        JsonlOracle({"mine": AnswerFileConfig(path="nowhere.jsonl")})
