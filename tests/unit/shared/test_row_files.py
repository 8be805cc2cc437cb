"""Rows of files by position: every format, folders of `datasets`, malformed records, and files that change.

The folders of `datasets` are written by hand, as `Dataset.save_to_disk` writes them, because the library is not a
dependency.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store import arrow_rows, text_rows
from rollmesh.shared.store.records import RecordError
from rollmesh.shared.store.row_file import FileChanged
from rollmesh.shared.store.row_files import RowFiles, open_rows

Rows = Sequence[Mapping[str, Any]]
ROWS = [{"q": f'What is {n}?\nSay it, in "words".', "a": str(n), "n": "é" * n or None} for n in range(40)]


def write_parquet(path: Path, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)


def write_stream(path: Path, rows: Rows) -> None:
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=6)


def write_arrow_file(path: Path, rows: Rows) -> None:
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=6)


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_dataset(folder: Path, rows: Rows) -> None:
    """Write a folder like `Dataset.save_to_disk`, whose files are not in the order of their names."""
    folder.mkdir(parents=True)
    half = len(rows) // 2
    write_stream(folder / "data-b.arrow", rows[:half])
    write_stream(folder / "data-a.arrow", rows[half:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"data-{x}.arrow"} for x in "ba"]}))
    (folder / "dataset_info.json").write_text("{}")


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "rows.parquet": write_parquet,
    "stream.arrow": write_stream,
    "file.arrow": write_arrow_file,
    "rows.jsonl": write_jsonl,
    "rows.csv": write_csv,
    "saved": write_dataset,
}


def scanned(files: RowFiles) -> list[Mapping[str, object]]:
    return [one.batch.record(index).fields for one in files.scan() for index in range(len(one.batch))]


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows_in_order_and_by_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(text_rows, "CHUNK_BYTES", 100)  # records cross the ends of chunks
    WRITERS[name](tmp_path / name, ROWS)
    files = open_rows([name], base_dir=tmp_path)
    assert len(files) == 40
    assert scanned(files) == ROWS
    assert [record.fields for record in files.rows([39, 3, 20, 3])] == [ROWS[39], ROWS[3], ROWS[20], ROWS[3]]
    with pytest.raises(IndexError, match=r"\[0, 40\), got 3 to 40"):
        files.rows([3, 40])


def test_lists_globs_and_folders_number_their_rows_in_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", ROWS[:10])
    write_jsonl(tmp_path / "a.jsonl", ROWS[10:20])
    write_csv(tmp_path / "c.csv", ROWS[20:])
    (tmp_path / "README.md").write_text("not rows")
    assert scanned(open_rows(["b.parquet", "a.jsonl"], base_dir=tmp_path)) == ROWS[:20]
    assert scanned(open_rows(["[ab].*"], base_dir=tmp_path)) == [*ROWS[10:20], *ROWS[:10]]
    files = open_rows([str(tmp_path)])
    assert scanned(files) == [*ROWS[10:20], *ROWS[:10], *ROWS[20:]]
    content = b"".join((tmp_path / name).read_bytes() for name in ("a.jsonl", "b.parquet", "c.csv"))
    assert files.digest == hashlib.sha256(content).hexdigest()
    assert [record.fields for record in files.rows([0, 39, 11])] == [ROWS[10], ROWS[39], ROWS[1]]


def test_folders_of_a_folder_are_splits(tmp_path: Path) -> None:
    for name, rows in (("train", ROWS[:30]), ("test", ROWS[30:])):
        write_dataset(tmp_path / "saved" / name, rows)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    files = open_rows(["saved"], base_dir=tmp_path)
    assert files.splits == ("train", "test")
    assert [one.split for one in files.scan()][-1] == "test"
    assert scanned(files) == ROWS
    write_jsonl(tmp_path / "more.jsonl", ROWS)
    with pytest.raises(ConfigError, match="only some of the files are in folders of splits"):
        open_rows(["saved", "more.jsonl"], base_dir=tmp_path)


def test_a_table_is_read_with_the_named_columns_only(tmp_path: Path) -> None:
    for name, write in (("a.parquet", write_parquet), ("a.arrow", write_stream)):
        write(tmp_path / name, [{"q": "1", "meta": {"a": "2", "b": 3}, "big": "x"}])
        (record,) = open_rows([name], base_dir=tmp_path, fields=["q", "meta.a"]).rows([0])
        assert record.fields == {"q": "1", "meta": {"a": "2", "b": 3}}


@pytest.mark.parametrize("bytes_max", [1, 300, 10**6])
def test_the_cache_of_row_groups_does_not_change_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bytes_max: int
) -> None:
    monkeypatch.setattr(arrow_rows.GroupCache, "__init__", _limited(bytes_max))
    monkeypatch.setattr(arrow_rows, "BATCH_BYTES", 1)
    write_parquet(tmp_path / "a.parquet", ROWS)
    files = open_rows(["a.parquet"], base_dir=tmp_path)
    for _ in range(2):
        assert [files.rows([row])[0].fields for row in range(40)] == ROWS
    assert ("a.parquet: a row group of" in caplog.text) is (bytes_max < 10**6)


def _limited(bytes_max: int) -> Callable[[arrow_rows.GroupCache], None]:
    whole = arrow_rows.GroupCache.__init__
    return lambda cache: whole(cache, bytes_max)


def test_blank_lines_and_a_missing_last_line_break_do_not_count_as_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"q": 1}\n  \n\n{"q": 2}\r\n{"q": 3}')
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfq,a\r\n\r\n1,"x\n\n""y"""\r\n\n2,\n')
    records = open_rows(["a.jsonl"], base_dir=tmp_path).rows([0, 1, 2])
    assert [(record.line, record.fields["q"]) for record in records] == [(2, 1), (5, 2), (6, 3)]
    records = open_rows(["a.csv"], base_dir=tmp_path).rows([0, 1])
    assert [(record.line, record.fields) for record in records] == [
        (3, {"q": "1", "a": 'x\n\n"y"'}),
        (5, {"q": "2", "a": None}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"q": 1}\n\n{broken\n', r"a.jsonl:3: is not JSON"),
        ("a.jsonl", b'{"q": 1}\n[2]\n', r"a.jsonl:2: must be a JSON object, got a list"),
        ("a.csv", b"q,a\n1,2\n3\n", r"a.csv:3: has 1 fields, the header has 2"),
        ("a.csv", b'q,a\n"1"x,2\n', r"a.csv:2: is not a record of CSV"),
        ("a.csv", b'q,a\n"1,2\n', r"a.csv:2: is not a record of CSV"),
        ("a.csv", b"q,a\n\xff,2\n", r"a.csv:2: is not UTF-8"),
        ("a.csv", b"q,q\n1,2\n", r"a.csv:1: the header must have different names of fields"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordError, match=message):
        scanned(open_rows([name], base_dir=tmp_path))


def test_a_string_of_a_table_that_is_not_utf8_is_named_by_its_row(tmp_path: Path) -> None:
    strings = _raw_strings(b"a", b"\xff", b"c")
    pq.write_table(pa.table({"q": strings}), tmp_path / "a.parquet")
    files = open_rows(["a.parquet"], base_dir=tmp_path)
    assert files.rows([2, 0])[0].fields == {"q": "c"}
    with pytest.raises(RecordError, match=r"a.parquet:2: is not UTF-8"):
        files.rows([0, 1])
    with pytest.raises(RecordError, match=r"a.parquet:2: is not UTF-8"):
        scanned(files)


def _raw_strings(*values: bytes) -> Any:
    binary = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), binary.buffers())


@pytest.mark.parametrize("quotes", [b"", b'"'])
def test_a_record_that_is_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quotes: bytes) -> None:
    monkeypatch.setattr(text_rows, "LINE_BYTES_MAX", 50)
    monkeypatch.setattr(text_rows, "CHUNK_BYTES", 20)
    (tmp_path / "a.csv").write_bytes(b"q,a\n1,2\n" + quotes + b"x" * 60 + b"\n3,4\n")
    with pytest.raises(RecordError, match=r"a.csv:3: is longer than 50 bytes; is a quote not closed\?"):
        open_rows(["a.csv"], base_dir=tmp_path)


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow", "rows.jsonl", "rows.csv"])
def test_a_file_that_changes_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, ROWS)
    files = open_rows([name], base_dir=tmp_path)
    files.rows([3])
    os.utime(path, ns=(1, 1))
    with pytest.raises(FileChanged, match=rf"{name} has changed since it was opened"):
        files.rows([3])
    path.unlink()
    with pytest.raises(FileChanged, match=rf"{name} cannot be read any more"):
        files.rows([3])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["none.parquet"], "cannot read .*none.parquet: No such file"),
        (["none*.parquet"], "no file matches .*none"),
        (["wrong.parquet"], "cannot read .*wrong.parquet: "),
        (["wrong.arrow"], "cannot read .*wrong.arrow: "),
        (["empty.csv"], "empty.csv is empty; the first line of a CSV file must have the names"),
        (["notes.txt"], "notes.txt must end with .parquet, .arrow, .jsonl, .csv"),
        (["folder"], "folder has no file that ends with"),
        (["outside"], "`splits` must have names in its folder, got '../folder'"),
    ],
)
def test_files_that_cannot_be_rows_are_named(tmp_path: Path, paths: list[str], message: str) -> None:
    for name in ("wrong.parquet", "wrong.arrow"):
        (tmp_path / name).write_text("neither of them")
    for name in ("notes.txt", "empty.csv"):
        (tmp_path / name).write_text("")
    for name in ("folder", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "dataset_dict.json").write_text('{"splits": ["../folder"]}')
    with pytest.raises(ConfigError, match=message):
        open_rows(paths, base_dir=tmp_path)
