"""Tasks in files beyond memory: equal tasks of every format, splits, labels, malformed rows, and resumed runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.services.data import task_scan
from rollmesh.services.data.config import DataConfig, build_engine, build_pools
from rollmesh.services.data.files_source import FilePool, FilesOptions, FilesSource
from rollmesh.services.data.jsonl_source import JsonlOptions, JsonlSource
from rollmesh.services.data.selectors.sec import SecOptions, SecSelector
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.records import RecordError
from rollmesh.testing.memory_bus import MemoryBus

from ..shared.test_row_files import WRITERS, write_dataset, write_jsonl, write_parquet

LINES = [
    {"question": f"What is {n} + {n}? ü", "answer": f"#### {2 * n}", "level": n % 3, "part": part, "by": by}
    for n, (part, by) in enumerate([("train", "correct"), ("test", None), ("validation", "brief")] * 20)
]


def pools(tmp_path: Path, path: str | tuple[str, ...], **settings: Any) -> dict[Split, FilePool]:
    return dict(FilesSource(options=FilesOptions(path=path, **settings), base_dir=tmp_path).pools())


def tasks(pool: FilePool) -> list[PoolTask]:
    return pool.read(range(len(pool)))


def train(tmp_path: Path, path: str, **settings: Any) -> list[PoolTask]:
    return tasks(pools(tmp_path, path, validation_share=0.0, test_share=0.0, **settings)[Split.TRAIN])


@pytest.mark.parametrize("split", ["", "part"])
def test_every_format_gives_the_tasks_of_the_jsonl_source(tmp_path: Path, split: str) -> None:
    mapped: dict[str, Any] = {
        "labels": {"level": "level"},
        "split": split,
        "scorers": "by",
        "tools": ("calculator",),
        "system": "Think.",
        "answer_pattern": r"#### (\d+)",
        "validation_share": 0.2,
        "test_share": 0.3,
    }
    write_jsonl(tmp_path / "lines.jsonl", LINES)
    expected = list(JsonlSource(options=JsonlOptions(path="lines.jsonl", **mapped), base_dir=tmp_path).tasks())
    for name, write in WRITERS.items():
        write(tmp_path / name, LINES)
        for answer in ("answer", ""):  # without a pattern, columns are proven to be good
            found = pools(tmp_path, name, **(mapped | ({} if answer else {"answer": "", "answer_pattern": ""})))
            for part in Split:
                members = [task for task in expected if task.split is part]
                assert len(members) > 5
                for one, task in zip(tasks(found[part]), members, strict=True):
                    assert (one.task_id, one.messages, one.labels) == (task.task_id, task.messages, task.labels)
                    assert (one.split, one.tools, one.scorers) == (part, task.tools, task.scorers)
                    assert one.oracle_ref.partition("#")[2] == (task.oracle_ref.partition("#")[2] if answer else "")
                levels = [found[part].label(position, "level") for position in range(len(members))]
                assert levels == [task.labels["level"] for task in members]


def test_messages_and_tools_are_columns(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rows = [
        {"prompt": said, "answer": ["4", "four"], "tools": ["python", "search"]},
        {"prompt": said[1:], "answer": ["4"], "tools": None},
    ]
    write_parquet(tmp_path / "a.parquet", rows)
    first, second = train(tmp_path, "a.parquet", prompt="prompt", tools_field="tools", tools=("calculator",))
    assert [(m.role, m.content) for m in first.messages] == [tuple(m.values()) for m in said]
    assert (first.tools, second.tools) == (("python", "search"), ("calculator",))


def test_folders_are_splits_unless_a_field_is(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_dataset(tmp_path / "saved" / part, [line for line in LINES if line["part"] == part])
    found = pools(tmp_path, "saved")
    assert {split.value: len(pool) for split, pool in found.items()} == {"train": 20, "validation": 0, "test": 20}
    assert found[Split.TEST].task(19).messages[0].content == "What is 58 + 58? ü"
    assert found[Split.TRAIN].task(0).task_id == "tasks-21"  # after the 20 rows of the folder test
    (tmp_path / "saved" / "train").rename(tmp_path / "saved" / "dev")
    with pytest.raises(ConfigError, match="folders with files must be train, validation, test, got dev; set `split`"):
        pools(tmp_path, "saved")
    assert len(pools(tmp_path, "saved", split="part")[Split.TRAIN]) == 20


GOOD = {"question": "q", "answer": "1", "part": "train", "who": "solver", "level": "x", "hidden": "calc/sum"}


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow", "rows.jsonl", "rows.csv"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, r'field "question": must be a string or a number, got null'),
        ({"question": " \u2003\t"}, r'field "question": is empty'),
        ({"answer": None}, r'field "answer": must be a string or a number, got null'),
        ({"part": "dev"}, r"""field "part": must be one of train, validation, test, got "dev\""""),
        ({"who": " "}, r'field "who": must be the name of an agent'),
        ({"level": " "}, r'field "level": is empty'),
        ({"hidden": None}, r'field "hidden": must be a manifest of hidden tests, or its reference'),
        ({"hidden": "{"}, r'field "hidden": begins with { but is not JSON'),
    ],
)
def test_a_malformed_row_is_named_by_file_row_and_field(
    tmp_path: Path, name: str, change: dict[str, object], message: str
) -> None:
    WRITERS[name](tmp_path / name, [GOOD] * 10 + [GOOD | change])
    row = 12 if name == "rows.csv" else 11  # the header is row 1
    with pytest.raises(RecordError, match=f"{name}:{row}: {message}"):
        pools(tmp_path, name, split="part", agent="who", labels={"level": "level"}, tests="hidden")


@pytest.mark.parametrize("field", ["agent", "scorers", "tools_field"])
@pytest.mark.parametrize("value", [3, True])
def test_a_number_is_not_a_name(tmp_path: Path, field: str, value: object) -> None:
    write_parquet(tmp_path / "a.parquet", [GOOD, GOOD | {"question": "r"}])
    write_parquet(tmp_path / "b.parquet", [GOOD | {"who": value}] * 2)
    with pytest.raises(RecordError, match=r'b.parquet:1: field "who": must be the name of'):
        pools(tmp_path, ("a.parquet", "b.parquet"), **{field: "who"})


def test_a_field_that_no_column_has_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [{"q": "1", "answer": "2"}])
    with pytest.raises(RecordError, match='a.parquet:1: field "question": is missing; the line has answer'):
        pools(tmp_path, "a.parquet")


def test_a_csv_file_without_a_header_does_not_show_its_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("6*7?,42\n1+1?,2\n")
    with pytest.raises(RecordError, match='a.csv:2: field "answer": is missing; the line has 2 others') as caught:
        pools(tmp_path, "a.csv")
    assert "42" not in str(caught.value)


def test_malformed_rows_can_be_skipped_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [GOOD | {"question": f"q{n}", "answer": "" if n % 4 == 1 else str(n)} for n in range(40)]
    for name in ("rows.parquet", "rows.jsonl"):
        caplog.clear()
        WRITERS[name](tmp_path / name, lines)
        with caplog.at_level(logging.WARNING):
            found = train(tmp_path, name, on_bad_row="skip")
        assert [task.task_id for task in found] == [f"tasks-{n + 1}" for n in range(40) if n % 4 != 1]
        assert "source=tasks rows=10" in caplog.text
        assert f'{name}:2: field "answer": is empty' in caplog.text
        assert f"{name}:18:" in caplog.text
        assert f"{name}:22:" not in caplog.text  # only the first rows are named


def test_a_line_that_is_not_json_can_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n{broken\n" + json.dumps(GOOD) + "\n")
    assert [task.task_id for task in train(tmp_path, "a.jsonl", on_bad_row="skip")] == ["tasks-1", "tasks-3"]


def test_ids_lead_back_to_positions(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", LINES)
    found = pools(tmp_path, "a.parquet", test_share=0.4)
    for pool in found.values():
        assert [pool.position(pool.task(n).task_id) for n in range(len(pool))] == list(range(len(pool)))
        for other in (
            "tasks-0",
            "tasks-61",
            "tasks-01",
            "mine-1",
            "tasks-",
            "tasks",
            "tasks--1",
            "tasks-" + "9" * 5000,
        ):
            assert pool.position(other) is None
    assert found[Split.TRAIN].position(found[Split.TEST].task(0).task_id) is None
    with pytest.raises(IndexError):
        found[Split.TRAIN].task(-1)
    with pytest.raises(IndexError):
        found[Split.TRAIN].task(len(found[Split.TRAIN]))
    write_jsonl(tmp_path / "all.jsonl", LINES)
    (whole,) = [
        pool for pool in pools(tmp_path, "all.jsonl", test_share=0.0, validation_share=0.0).values() if len(pool)
    ]
    assert (whole.position("tasks-60"), whole.position("tasks-61"), whole.position("tasks-0")) == (59, None, None)


def test_a_run_resumes_with_the_same_pool_and_not_with_another(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", LINES)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    mapped: dict[str, Any] = {"labels": {"level": "level"}}

    def selector(path: str, **settings: Any) -> SecSelector:
        pool = pools(tmp_path, path, **settings)[Split.TRAIN]
        return SecSelector(pool=pool, seed=1, options=SecOptions())

    first, again = selector("a.parquet", **mapped), selector("elsewhere/b.parquet", **mapped)
    assert first.categories == ("0", "1", "2")
    again.restore(first.snapshot())
    assert [again.draw(n, frozenset()) for n in range(20)] == [first.draw(n, frozenset()) for n in range(20)]
    digests = {
        pools(tmp_path, "a.parquet", **settings)[Split.TRAIN].digest
        for settings in ({}, mapped, {"test_share": 0.2}, {"split": "part"}, {"system": "s"}, {"name": "mine"})
    }
    assert len(digests) == 6


def test_the_digest_of_a_pool_stays_the_same_in_later_releases(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n')
    found = {
        pools(tmp_path, "a.jsonl", labels={"x": "question", "a": "answer"}, test_share=0.0, **settings)[
            Split.TRAIN
        ].digest
        for settings in ({}, {"on_bad_row": "skip"}, {"validation_share": 0.05})
    }
    assert found == {"6a6b021be40e6b7689dc9935e7385c89ec51d8366f69b788b6d3e95b5ba09068"}


def test_a_label_of_too_many_values_is_no_category(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_scan, "LABEL_VALUES_MAX", 4)
    for name in ("rows.parquet", "rows.jsonl"):
        WRITERS[name](tmp_path / name, LINES)
        labels = {"level": "level", "question": "question"}
        pool = pools(tmp_path, name, labels=labels, test_share=0.0, validation_share=0.0)[Split.TRAIN]
        assert pool.label(59, "level") == "2"
        assert pool.task(59).labels["question"] == "What is 59 + 59? ü"
        with pytest.raises(ConfigError, match="the label `question` of the source `tasks` has more than"):
            SecSelector(pool=pool, seed=1, options=SecOptions(label="question"))
        assert pool.label(59, "other") == ""


def test_numbers_booleans_and_categories_are_texts_as_in_json(tmp_path: Path) -> None:
    columns = {
        "question": pa.array(["a", "b"]).dictionary_encode(),
        "answer": pa.array([10**12, 2]),
        "easy": pa.array([True, False]),
        "share": pa.array([0.5, 1e-7]),
        "day": pa.array([1, 2], pa.int8()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    labels = {"easy": "easy", "share": "share", "day": "day", "answer": "answer"}
    first, second = train(tmp_path, "a.parquet", labels=labels)
    assert first.labels == {"easy": "true", "share": "0.5", "day": "1", "answer": "1000000000000"}
    assert second.labels == {"easy": "false", "share": "1e-07", "day": "2", "answer": "2"}
    for name in ("easy", "day", "answer"):
        pool = pools(tmp_path, "a.parquet", labels={name: name}, test_share=0.0, validation_share=0.0)[Split.TRAIN]
        assert [pool.label(n, name) for n in range(2)] == [first.labels[name], second.labels[name]]


def test_the_answer_is_nowhere_in_a_task(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [GOOD | {"answer": "Zanzibar"}])
    assert "Zanzibar" not in repr(train(tmp_path, "a.parquet"))


async def test_the_data_service_draws_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", LINES)
    source = {"name": "files", "options": {"path": ["a.parquet"], "split": "part"}}
    config = config_from_dict(DataConfig, {"source": source})
    assert len(build_pools(config, tmp_path)[Split.TRAIN]) == 20
    engine = build_engine(config, bus=MemoryBus(), clock=ManualClock(), base_dir=tmp_path)
    drawn = await engine.tasks_in_order(split="test", first_draw=18, num=9)
    assert [(draw, task.task_id) for draw, task in drawn] == [(18, "tasks-56"), (19, "tasks-59")]
    monkeypatch.setattr("rollmesh.services.data.engine.READ_FIRST", 2)
    monkeypatch.setattr("rollmesh.services.data.engine.READ_CHARS_MAX", 150)
    drawn = await engine.tasks_in_order(split="test", first_draw=0, num=20)
    assert [draw for draw, _ in drawn] == list(range(10))  # of 15 to 17 characters
    await engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ""}, "path"),
        ({"path": []}, "path"),
        ({"path": "a.csv", "on_bad_row": "ignore"}, "on_bad_row"),
        ({"path": "a.csv", "num_lines_max": 3}, "num_lines_max"),
    ],
)
def test_a_wrong_option_is_named(settings: dict[str, Any], message: str) -> None:
    config = config_from_dict(DataConfig, {"source": {"name": "files", "options": settings}})
    with pytest.raises(ConfigError, match=message):
        build_pools(config)
