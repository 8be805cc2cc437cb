"""Extras of a task at the data service: fields of files become extras, and private ones are in no task message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.services.data.config import DataConfig, build_engine, build_pools
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.servicer import DataServicer, encode_task
from rollmesh.services.data.task import PoolTask, Split, StoredPool, TaskPool
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.extras import ExtraError, decode_extras, encode_extras
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.errors import ConfigError, InvalidInput, UnknownSplit, UnknownTask
from rollmesh.shared.store.records import RecordError
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import data_pb2

from ..shared.test_row_files import WRITERS, write_jsonl, write_parquet

SECRET = "the-walrus"
ROWS: list[dict[str, object]] = [
    {"question": "1+1?", "answer": "2", "kit": {"a.py": "x = 1"}, "worked": f"{SECRET} ü", "said": [{"role": "user"}]},
    {"question": "2+2?", "answer": "4", "kit": None, "worked": None, "said": []},
]
MAPPED: dict[str, Any] = {"extras": {"files": "kit"}, "private_extras": {"solution": "worked", "turns": "said"}}
TASK = PoolTask(task_id="t", messages=(Message(role="user", content="1+1"),))


def source(path: str, name: str = "files", **options: Any) -> dict[str, Any]:
    return {"source": {"name": name, "options": {"path": path, "validation_share": 0, "test_share": 0, **options}}}


def train(folder: Path, settings: dict[str, Any]) -> TaskPool:
    return build_pools(config_from_dict(DataConfig, settings), folder)[Split.TRAIN]


@pytest.mark.parametrize(("name", "path"), [("jsonl", "a.jsonl"), ("files", "a.jsonl"), ("files", "a.parquet")])
def test_fields_become_extras_and_the_message_has_the_public_ones(tmp_path: Path, name: str, path: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_parquet(tmp_path / "a.parquet", ROWS)
    pool = train(tmp_path, source(path, name, **MAPPED))
    first, second = pool.task(0), pool.task(1)
    assert dict(first.extras) == {"files": {"a.py": "x = 1"}}
    assert dict(first.private_extras) == {"solution": f"{SECRET} ü", "turns": [{"role": "user"}]}
    assert (dict(second.extras), dict(second.private_extras)) == ({"files": None}, {"solution": None, "turns": []})
    message = encode_task(first)
    assert decode_extras(message.extras) == {"files": {"a.py": "x = 1"}}
    assert SECRET not in str(message) + repr(first)


def test_a_draw_from_a_table_does_not_read_private_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", ROWS)
    pool = train(tmp_path, source("a.parquet", **MAPPED))
    read: list[list[str]] = []
    decoded = pq.ParquetFile.iter_batches

    def listed(file: pq.ParquetFile, rows: int, groups: list[int], columns: list[str], **how: bool) -> Any:
        read.append(columns)
        return decoded(file, rows, groups, columns, **how)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", listed)
    assert isinstance(pool, StoredPool)
    (drawn,) = pool.read([0])
    assert (dict(drawn.extras), dict(drawn.private_extras)) == ({"files": {"a.py": "x = 1"}}, {})
    assert replace(drawn, private_extras=pool.task(0).private_extras) == pool.task(0)
    assert [sorted(columns) for columns in read] == [
        ["answer", "kit", "question"],
        ["answer", "kit", "question", "said", "worked"],
    ]


def test_the_digest_of_a_pool_in_memory_has_extras_if_there_are_any() -> None:
    tasks = (
        TASK,
        *(replace(TASK, extras={"a": n}) for n in (1, 2)),
        *(replace(TASK, private_extras={"a": n}) for n in (1, 2)),
    )
    assert len({MemoryPool([task]).digest for task in tasks}) == 5


def test_columns_prove_that_extras_are_texts_of_a_possible_size(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": "1", "worked": "\x01" * n if n % 3 else None} for n in range(300)]
    pools = {}
    for name in ("a.parquet", "a.jsonl"):
        WRITERS["rows.parquet" if name == "a.parquet" else "rows.jsonl"](tmp_path / name, rows)
        pools[name] = train(tmp_path, source(name, private_extras={"solution": "worked"}))
    for position in (0, 1, 299):
        one, other = (pool.task(position) for pool in pools.values())
        assert (one.messages, one.private_extras) == (other.messages, other.private_extras)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
@pytest.mark.parametrize(("kit", "size"), [("x" * 66_000, 66_002), ("\x01" * 12_000, 72_002)])
def test_extras_that_are_too_large_are_named_by_row_and_field(tmp_path: Path, name: str, kit: str, size: int) -> None:
    rows = [{"question": "q", "answer": "1", "kit": "x"}, {"question": "q", "answer": "1", "kit": kit}]
    WRITERS[name](tmp_path / name, rows)
    with pytest.raises(RecordError, match=rf'{name}:2: field "kit": has {size} bytes of JSON .* more than 65536'):
        train(tmp_path, source(name, extras={"files": "kit"}))
    assert len(train(tmp_path, source(name, private_extras={"files": "kit"}))) == 2


def test_values_that_are_not_json_are_named_without_their_text(tmp_path: Path) -> None:
    table = pa.table({"question": ["q"], "answer": ["1"], "kit": pa.array([SECRET.encode()], pa.binary())})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(RecordError, match=r'a.parquet:1: field "kit": must be a JSON value .*, got a bytes') as error:
        train(tmp_path, source("a.parquet", private_extras={"image": "kit"}))
    assert SECRET not in str(error.value)
    (tmp_path / "b.jsonl").write_text('{"question": "q", "answer": "1", "kit": NaN}\n')
    with pytest.raises(RecordError, match=r'b.jsonl:1: field "kit": must be a JSON value without NaN'):
        train(tmp_path, source("b.jsonl", "jsonl", extras={"x": "kit"}))
    with pytest.raises(RecordError, match=r'b.jsonl:1: field "none": is missing'):
        train(tmp_path, source("b.jsonl", "jsonl", extras={"x": "none"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": {"s": "worked"}}, "`labels.s` must not have the private field 'worked', because every process of"),
        ({"labels": {"s": "worked.text"}}, "the run can read it, got 'worked.text'"),
        *(
            ({setting: "worked"}, f"`{setting}` must not have the private field 'worked', because every process of")
            for setting in ("prompt", "split", "agent", "scorers", "tools_field")
        ),
        ({"prompt": "worked.question"}, "the run can read it, got 'worked.question'"),
        ({"extras": {"p": "worked"}}, "`extras.p` must not have the private field 'worked'"),
        ({"extras": {"p": "meta"}, "private_extras": {"t": "meta.worked"}}, "got 'meta'"),
        ({"extras": {"p": "answer"}}, "`extras.p` must not have the private field 'answer', because every process"),
        ({"extras": {"p": "checks"}, "tests": "checks"}, "`extras.p` must not have the private field 'checks'"),
        ({"extras": {"s": "a"}}, "must not have names of `extras`, got 's' in both"),
        ({"private_extras": {"not a name": "b"}}, "private_extras"),
        ({"private_extras": {"s": ""}}, "private_extras"),
    ],
)
def test_settings_that_would_publish_a_private_field_are_rejected(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, source("a.jsonl", "jsonl", **{"private_extras": {"s": "worked"}, **options}))


def test_extras_of_a_custom_task_are_checked() -> None:
    for wrong, message in (
        ({"a b": 1}, "must have a name of 1 to 64 letters"),
        ({"a": object()}, "'a' must be a JSON value"),
        ({"a": "\ud800"}, "of valid Unicode"),
        ({str(n): n for n in range(65)}, "at most 64 names"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(TASK, private_extras=wrong)
    with pytest.raises(ExtraError, match="has 65538 bytes of JSON"):
        replace(TASK, extras={"a": "x" * 65_536})
    assert decode_extras(encode_extras({"a": [1, None, "ü"], "b": 1.5})) == {"a": [1, None, "ü"], "b": 1.5}
    with pytest.raises(ExtraError, match="'a' is not JSON"):
        decode_extras({"a": "{"})


# GetPrivateExtras -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "path"), [("jsonl", "a.jsonl"), ("files", "a.parquet")])
async def test_the_service_returns_the_named_private_extras_of_a_task(tmp_path: Path, name: str, path: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_parquet(tmp_path / "a.parquet", ROWS)
    config = config_from_dict(DataConfig, source(path, name, **MAPPED))
    engine = build_engine(config, bus=MemoryBus(), clock=ManualClock(), base_dir=tmp_path)
    servicer = DataServicer(engine)

    async def asked(**fields: Any) -> dict[str, object]:
        given = {"run": "r", "task_id": "tasks-1", "split": "train", "names": ["solution", "files", "other"], **fields}
        response = await servicer.GetPrivateExtras(data_pb2.GetPrivateExtrasRequest(**given), None)
        return decode_extras(response.extras)

    assert await asked() == {"solution": f"{SECRET} ü"}, "those that it has; public ones are not among them"
    assert await asked(task_id="tasks-2", names=["solution", "turns"]) == {"solution": None, "turns": []}
    for wrong, message in (
        ({"run": ""}, "`run` must name a run"),
        ({"task_id": ""}, "`task_id` must name a task"),
        ({"names": []}, "`names` must have 1 to 64 entries, got 0"),
        ({"names": ["a"] * 65}, "`names` must have 1 to 64 entries, got 65"),
    ):
        with pytest.raises(InvalidInput, match=message):
            await asked(**wrong)
    with pytest.raises(UnknownTask, match="the split `train` has no task `tasks-3`; give every data node the source"):
        await asked(task_id="tasks-3")
    with pytest.raises(UnknownSplit, match="the split `test` has no tasks; splits with tasks: train"):
        await asked(split="test")
    await engine.close()
