"""A JSONL file of a user: field mapping, splits, and errors that name file, line and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.services.data.jsonl_source import JsonlOptions, JsonlSource
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.task import Split
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.records import RecordError

GSM8K = {"question": "Tom has 3 bags of 4 apples. How many?", "answer": "3 * 4 = <<3*4=12>>12\n#### 12"}


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def jsonl_pools(options: JsonlOptions) -> dict[Split, MemoryPool]:
    tasks = list(JsonlSource(options=options).tasks())
    return {split: MemoryPool(task for task in tasks if task.split is split) for split in Split}


def everything(path: Path, **settings: object) -> MemoryPool:
    config = JsonlOptions(path=str(path), validation_share=0.0, test_share=0.0, **settings)  # type: ignore[arg-type]
    return jsonl_pools(config)[Split.TRAIN]


def test_a_gsm8k_like_file_becomes_tasks(tmp_path: Path) -> None:
    path = write(tmp_path, GSM8K, "", GSM8K)
    pool = everything(path, name="gsm8k", answer_pattern=r"#### (\S+)", system="Think.", tools=("python",))
    assert len(pool) == 2
    task = pool.task(1)
    assert task.task_id == "gsm8k-3"
    assert [(m.role, m.content) for m in task.messages] == [("system", "Think."), ("user", GSM8K["question"])]
    assert task.oracle_ref.startswith("jsonl:gsm8k@")
    assert task.oracle_ref.endswith("#3")
    assert task.tools == ("python",)


def test_fields_are_mapped_by_name_and_path(tmp_path: Path) -> None:
    line = {"input": [{"role": "user", "content": "2+2?"}], "meta": {"truth": 4, "grade": 2}}
    pool = everything(write(tmp_path, line), prompt="input", answer="meta.truth", labels={"level": "meta.grade"})
    assert pool.task(0).messages[0].content == "2+2?"
    assert pool.label(0, "level") == "2"


def test_hash_ranges_split_by_prompt_and_not_by_order(tmp_path: Path) -> None:
    lines = [{"question": f"q{i}", "answer": "1"} for i in range(300)]

    def splits(order: list[dict[str, str]]) -> dict[Split, set[str]]:
        pools = jsonl_pools(JsonlOptions(path=str(write(tmp_path, *order)), validation_share=0.2, test_share=0.2))
        return {s: {p.task(i).messages[0].content for i in range(len(p))} for s, p in pools.items()}

    found = splits(lines)
    assert found == splits(lines[::-1])
    assert sum(len(part) for part in found.values()) == 300
    assert all(len(part) > 30 for part in found.values())


def test_a_split_field_decides_where_it_is_named(tmp_path: Path) -> None:
    lines = [{"question": "q", "answer": "1", "part": part} for part in ("train", "test", "test", "validation")]
    pools = jsonl_pools(JsonlOptions(path=str(write(tmp_path, *lines)), split="part"))
    assert {split.value: len(pool) for split, pool in pools.items()} == {"train": 1, "validation": 1, "test": 2}


def test_a_line_names_its_agent_and_its_scorers(tmp_path: Path) -> None:
    lines = [
        GSM8K | {"who": "solver", "by": ["correct", "short"]},
        GSM8K | {"who": None, "by": None},
        GSM8K | {"who": "coder", "by": "tests"},
    ]
    pool = everything(write(tmp_path, *lines), agent="who", scorers="by")
    named = [(task.agent, task.scorers) for task in map(pool.task, range(3))]
    assert named == [("solver", ("correct", "short")), ("", ()), ("coder", ("tests",))]


def test_columns_called_agent_and_scorers_are_not_read_unless_they_are_named(tmp_path: Path) -> None:
    task = everything(write(tmp_path, GSM8K | {"agent": "solver", "scorers": ["correct"]})).task(0)
    assert (task.agent, task.scorers) == ("", ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"by": None}, r'"who": is missing; the line has'),
        ({"who": None}, r'"by": is missing; the line has'),
        ({"who": " ", "by": None}, r'"who": must be the name of an agent, or null for the default agent, got " "'),
        ({"who": 3, "by": None}, r'"who": must be the name of an agent, or null for the default agent, got 3'),
        ({"who": ["solver"], "by": None}, r'"who": must be the name of an agent, .*, got \["solver"\]'),
        ({"who": None, "by": []}, r'"by": must be the name of a reward, a list of different names, or null for all, got \[\]'),
        ({"who": None, "by": ["a", "a"]}, r'"by": must be .* a list of different names, .*, got \["a", "a"\]'),
        ({"who": None, "by": ["a", 3]}, r'"by": must be .*, got \["a", 3\]'),
        ({"who": None, "by": {"a": 1}}, r'"by": must be .*, got \{"a": 1\}'),
        ({"who": None, "by": True}, r'"by": must be .*, got true'),
        ({"who": None, "by": [" "]}, r'"by": must be .*, got \[" "\]'),
    ],
)  # fmt: skip
def test_a_wrong_agent_or_scorer_of_a_line_is_named(tmp_path: Path, line: dict[str, object], message: str) -> None:
    path = write(tmp_path, GSM8K | {"who": "solver", "by": None}, GSM8K | line)
    with pytest.raises(RecordError, match=f"mine.jsonl:2: field {message}"):
        everything(path, agent="who", scorers="by")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r":2: is not JSON: .* at column 2"),
        ("[" * 100_000, r":2: is nested too deeply"),
        ("[1]", r":2: must be a JSON object, got a list"),
        ({"answer": "#### 1"}, r':2: field "question": is missing; the line has answer'),
        ({"question": None, "answer": "#### 1"}, r':2: field "question": must be a string or a number, got null'),
        ({"question": " ", "answer": "#### 1"}, r':2: field "question": is empty'),
        ({"question": "q"}, r':2: field "answer": is missing'),
        ({"question": "q", "answer": "12"}, r':2: field "answer": does not match'),
        ({"question": [], "answer": "#### 1"}, r':2: field "question": is an empty list'),
        ({"question": ["q"], "answer": "#### 1"}, r':2: field "question": message 0 must be an object'),
        ({"question": [{"role": "user"}], "answer": "#### 1"}, r':2: field "question": message 0 must have'),
    ],
)
def test_a_malformed_line_is_named_by_file_line_and_field(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path, GSM8K, line)
    with pytest.raises(RecordError, match="mine.jsonl" + message):
        everything(path, answer_pattern=r"#### (\S+)")


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(RecordError, match=r"mine.jsonl:1: is not UTF-8"):
        everything(path)


def test_an_unknown_split_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, GSM8K | {"part": "dev"})
    with pytest.raises(RecordError, match=r'mine.jsonl:1: field "part": must be one of train, validation, test'):
        jsonl_pools(JsonlOptions(path=str(path), split="part"))


def test_a_file_beyond_the_line_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=":3: the file has more than 2 lines"):
        everything(write(tmp_path, GSM8K, GSM8K, GSM8K), num_lines_max=2)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot read nowhere.jsonl: No such file"):
        everything(Path("nowhere.jsonl"))


def test_the_answer_is_nowhere_in_a_task(tmp_path: Path) -> None:
    path = write(tmp_path, GSM8K | {"answer": "Zanzibar"})
    assert "Zanzibar" not in repr(everything(path).task(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ""}, "path"),
        ({"name": "a/b"}, "name.*a/b"),
        ({"answer_pattern": "("}, "answer_pattern"),
        ({"prompt": ""}, "prompt"),
        ({"num_lines_max": 0}, "num_lines_max.*0"),
    ],
)
def test_settings_out_of_range_name_field_and_value(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonlOptions(**{"path": "x.jsonl", **settings})  # type: ignore[arg-type]
