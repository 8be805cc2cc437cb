"""Rows of files by position: every format, folders of `datasets`, malformed records, and files that change.

The folders of `datasets` are written by hand, as `Dataset.save_to_disk` writes them, because the library is not a
dependency.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
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
    digest = hashlib.sha256()
    for name in ("a.jsonl", "b.parquet", "c.csv"):
        digest.update(Path(name).suffix.encode() + b"\0" + hashlib.sha256((tmp_path / name).read_bytes()).digest())
    assert files.digest == digest.hexdigest()
    assert [record.fields for record in files.rows([0, 39, 11])] == [ROWS[10], ROWS[39], ROWS[1]]


def test_the_digest_says_where_files_end_and_which_format_they_have(tmp_path: Path) -> None:
    contents = {"two/a.csv": b"q,a\n1,2\n", "two/b.csv": b"q,a\n3,4\n", "empty.csv": b"{}\n", "empty.jsonl": b"{}\n"}
    (tmp_path / "two").mkdir()
    for name, content in (contents | {"one.csv": contents["two/a.csv"] + contents["two/b.csv"]}).items():
        (tmp_path / name).write_bytes(content)
    names = ("two", "one.csv", "empty.csv", "empty.jsonl")
    assert len({open_rows([name], base_dir=tmp_path).digest for name in names}) == 4


def test_a_process_reads_a_file_once_for_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0
    whole = hashlib.file_digest

    def counted(*args: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return whole(*args)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    first = open_rows(["a.jsonl"], base_dir=tmp_path).digest
    assert open_rows(["a.jsonl"], base_dir=tmp_path).digest == first
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert open_rows(["a.jsonl"], base_dir=tmp_path).digest == first
    assert num_read == 2


def test_a_truncated_arrow_stream_is_not_opened(tmp_path: Path) -> None:
    write_stream(tmp_path / "a.arrow", ROWS)
    whole = (tmp_path / "a.arrow").read_bytes()
    for size in range(8, len(whole), 8):
        (tmp_path / "a.arrow").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"a.arrow does not end with the end mark|cannot read .*a.arrow"):
            open_rows(["a.arrow"], base_dir=tmp_path)
    (tmp_path / "a.arrow").write_bytes(whole * 2)
    with pytest.raises(ConfigError, match=r"a.arrow does not end with the end mark of an Arrow stream"):
        open_rows(["a.arrow"], base_dir=tmp_path)


def test_compressed_arrow_files_have_a_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_rows, "DECODED_BYTES_MAX", 150_000)
    table = pa.table({"q": ["x" * 1_000] * 100})
    for name, compression in (("plain-1", None), ("plain-2", None), ("zstd-1", "zstd"), ("zstd-2", "zstd")):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(str(tmp_path / f"{name}.arrow"), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=10)
    for paths in (["plain-*.arrow"], ["zstd-1.arrow"]):
        assert len(open_rows(paths, base_dir=tmp_path)) in (100, 200)
    with pytest.raises(
        ConfigError, match=r"zstd-2.arrow is compressed, so it is held in memory, and the files need mor"
    ):
        open_rows(["zstd-*.arrow"], base_dir=tmp_path)


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


def test_names_of_files_are_splits_if_a_folder_has_several(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    write_parquet(tmp_path / "hub" / "train-00000-of-00002.parquet", ROWS[:10])
    write_parquet(tmp_path / "hub" / "train-00001-of-00002.parquet", ROWS[10:30])
    (tmp_path / "hub" / "._train-00000-of-00002.parquet").write_bytes(b"of another system")
    assert open_rows(["hub"], base_dir=tmp_path).splits == ()
    write_parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", ROWS[30:])
    files = open_rows(["hub"], base_dir=tmp_path)
    assert files.splits == ("test", "train")
    assert sum(len(one.batch) for one in files.scan() if one.split == "test") == 10
    assert open_rows(["hub/*.parquet"], base_dir=tmp_path).splits == ()
    write_jsonl(tmp_path / "hub" / "dev.jsonl", ROWS)
    with pytest.raises(
        ConfigError, match="only some of the files are in folders of splits, or have a name that begins"
    ):
        open_rows(["hub"], base_dir=tmp_path)


def test_files_that_are_named_twice_or_hide_folders_are_rejected(tmp_path: Path) -> None:
    for name in ("all/train/a.jsonl", "all/test/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        write_jsonl(tmp_path / name, ROWS)
    for paths in (["all/train", "all/train/*.jsonl"], ["all", "all/../all"]):
        with pytest.raises(ConfigError, match=r"a.jsonl is named twice; name each file once"):
            open_rows(paths, base_dir=tmp_path)
    write_jsonl(tmp_path / "all" / "notes.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"all has files, such as notes.jsonl, and folders with files, such as test"):
        open_rows(["all"], base_dir=tmp_path)


def test_threads_share_row_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ROWS)
    write_jsonl(tmp_path / "b.jsonl", ROWS)
    files = open_rows(["a.parquet", "b.jsonl"], base_dir=tmp_path)
    orders = [[(seed + step * n) % 80 for n in range(80)] for seed, step in ((0, 1), (79, 79), (5, 7), (3, 31))] * 3
    with ThreadPoolExecutor(4) as threads:
        for order, records in zip(orders, threads.map(files.rows, orders), strict=True):
            assert [record.fields for record in records] == [ROWS[row % 40] for row in order]


def test_a_column_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    for name, write in (("a.parquet", write_parquet), ("a.arrow", write_stream), ("a.jsonl", write_jsonl)):
        write(tmp_path / name, [{"m.q": "1", "m": {"q": "2", "a": "3"}}])
        files = open_rows([name], base_dir=tmp_path, fields=["m.q", "m.a"])
        (record,) = files.rows([0])
        assert (record.text("m.q"), record.text("m.a")) == ("1", "3")
        if (texts := next(iter(files.scan())).batch.texts("m.q")) is not None:
            assert texts.encoded()[1] == ["1"]


def test_a_table_is_read_with_the_named_columns_only(tmp_path: Path) -> None:
    for name, write in (("a.parquet", write_parquet), ("a.arrow", write_stream)):
        write(tmp_path / name, [{"q": "1", "meta": {"a": "2", "b": 3}, "big": "x"}])
        (record,) = open_rows([name], base_dir=tmp_path, fields=["q", "meta.a"]).rows([0])
        assert record.fields == {"q": "1", "meta": {"a": "2", "b": 3}}


@pytest.mark.parametrize("bytes_max", [1, 300, 10**6])
def test_the_cache_of_row_groups_does_not_change_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bytes_max: int
) -> None:
    monkeypatch.setattr(arrow_rows, "CACHE_BYTES_MAX", bytes_max)
    monkeypatch.setattr(arrow_rows, "BATCH_BYTES", 1)
    write_parquet(tmp_path / "a.parquet", ROWS)
    files = open_rows(["a.parquet"], base_dir=tmp_path)
    for _ in range(2):
        assert [files.rows([row])[0].fields for row in range(40)] == ROWS
    assert ("a.parquet: a row group of" in caplog.text) is (bytes_max < 10**6)


def test_a_value_that_a_parquet_file_stores_once_does_not_make_a_large_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrow_rows, "BATCH_BYTES", 100_000)
    monkeypatch.setattr(arrow_rows, "CACHE_BYTES_MAX", 10**6)
    long = "context " * 125
    rows = [{"q": "short" if n < 1_000 else long, "a": str(n)} for n in range(3_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    files = open_rows(["a.parquet"], base_dir=tmp_path)
    assert not caplog.text
    sizes = [one.batch.num_bytes for one in files.scan() if isinstance(one.batch, arrow_rows.ArrowBatch)]
    assert max(sizes) < 100_000 + 2 * 256 * len(long)
    assert "a.parquet: a row group of 2" in caplog.text
    assert scanned(files) == rows


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
        ("a.jsonl", b'{"q": ' + b"9" * 5000 + b"}\n", r"a.jsonl:1: has a number with too many digits"),
        ("a.jsonl", b'{"q": "\\uD83D"}\n', r"a.jsonl:1: has half of a surrogate pair"),
        ("a.jsonl", b'{"q": "\xed\xa0\xbd"}\n', r"a.jsonl:1: is not UTF-8"),
        ("a.csv", b"q,a\n1,2\n3\n", r"a.csv:3: has 1 fields, the header has 2"),
        ("a.csv", b'q,a\n"1"x,2\n', r"a.csv:2: is not a record of CSV"),
        ("a.csv", b'q,a\n"1,2\n', r"a.csv:2: is not a record of CSV"),
        ("a.csv", b"q,a\n\xff,2\n", r"a.csv:2: is not UTF-8"),
        ("a.csv", b"q,q\n1,2\n", r"a.csv:1: the header must have different names of fields, got 1 names of 2 fields"),
        ("a.csv", b'q,a\n5" pipe,3\n6" pipe,4\n7,5\n', r"a.csv:2: has 2 records of CSV, because a quote or"),
        ("a.csv", b"q,a\n1,2\r3,4\n", r"a.csv:2: has 2 records of CSV, because a quote or a carriage return"),
        ("a.csv", b"q,a\r1,2\r3,4\r", r"a.csv:1: has 3 records of CSV"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordError, match=message):
        scanned(open_rows([name], base_dir=tmp_path))


@pytest.mark.parametrize("quoted", [True, False])
def test_csv_gives_the_records_of_the_module_csv_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quoted: bool
) -> None:
    chance, num_equal, path = random.Random(7), 0, tmp_path / "a.csv"
    for _ in range(300):
        monkeypatch.setattr(text_rows, "CHUNK_BYTES", chance.choice([7, 50, 1000]))
        values = ["".join(chance.choices('ab,"\n\r é', k=chance.randrange(6))) for _ in range(2 * chance.randrange(8))]
        lines = list(zip(values[::2], values[1::2], strict=True))
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator=chance.choice(["\n", "\r\n"]), quoting=csv.QUOTE_ALL)
            writer.writerow(["x", "y"])
            if quoted:
                writer.writerows(lines)
            else:
                file.writelines(f"{x},{y}\n" for x, y in lines)
        with path.open(newline="") as file:
            expected = [tuple(one) for one in csv.reader(file) if "".join(one).strip() or len(one) > 1][1:]
        files = open_rows(["a.csv"], base_dir=tmp_path)
        try:
            found = [(record.fields["x"] or "", record.fields["y"] or "") for record in files.rows(range(len(files)))]
        except RecordError:
            assert not quoted
            continue
        assert found == expected
        num_equal += 1
    assert num_equal == 300 if quoted else 20 < num_equal < 280


def test_a_string_of_a_table_that_is_not_utf8_is_named_by_its_row(tmp_path: Path) -> None:
    strings = _raw_strings(b"a", b"\xff", b"c")
    pq.write_table(pa.table({"q": strings}), tmp_path / "a.parquet")
    files = open_rows(["a.parquet"], base_dir=tmp_path)
    assert files.rows([2, 0])[0].fields == {"q": "c"}
    with pytest.raises(RecordError, match=r"a.parquet:2: is not UTF-8"):
        files.rows([0, 1])
    with pytest.raises(RecordError, match=r"a.parquet:2: is not UTF-8"):
        scanned(files)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_types_without_a_kernel_or_an_equal_type_of_python_are_read(tmp_path: Path, name: str) -> None:
    columns = {
        "view": pa.array(["a", "b", "c"]).cast(pa.string_view()),
        "kind": pa.array(["a", None, "a"]).dictionary_encode(),
        "at": pa.array([1_700_000_000_000_000_001, None, 3], pa.timestamp("ns", "UTC")),
        "took": pa.array([1_001, None, 3], pa.duration("ns")),
    }
    write_table(tmp_path / name, pa.table(columns))
    files = open_rows([name], base_dir=tmp_path)
    first, third = files.rows([0, 2])
    assert (first.fields["view"], third.fields["view"]) == ("a", "c")
    assert first.fields["at"] == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert first.fields["took"] == timedelta(microseconds=1)
    batch = next(iter(files.scan())).batch
    for field, values in (("view", ["a", "b", "c"]), ("kind", ["a", "", "a"])):
        texts = batch.texts(field)
        assert texts is not None
        assert [bytes(text).decode() for text in texts.utf8()] == values
        assert (texts.present.tolist(), texts.usable.tolist()) == ([bool(value) for value in values],) * 2
        indices, known = texts.encoded()
        assert [known[index] for index, value in zip(indices, values, strict=True) if value] == [*filter(None, values)]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_value_that_python_cannot_represent_is_named_by_its_row(tmp_path: Path, name: str) -> None:
    write_table(tmp_path / name, pa.table({"day": pa.array([1, 2**62, 3], pa.timestamp("us"))}))
    files = open_rows([name], base_dir=tmp_path)
    assert len(files.rows([0, 2])) == 2
    with pytest.raises(RecordError, match=rf"{name}:2: cannot be decoded: "):
        scanned(files)


def write_table(path: Path, table: Any) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


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
    with pytest.raises(FileChanged, match=rf"{name} has changed .*restore the file and restart the service, or start"):
        files.rows([3])
    path.unlink()
    with pytest.raises(FileChanged, match=rf"{name} can no longer be read"):
        files.rows([3])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["none.parquet"], "cannot read .*none.parquet: No such file"),
        (["none*.parquet"], "no file matches .*none"),
        (["wrong.parquet"], "cannot read .*wrong.parquet: "),
        (["wrong.arrow"], "cannot read .*wrong.arrow: "),
        (["empty.csv"], "empty.csv is empty; the first line of a CSV file must have the names"),
        (["mark.csv"], "mark.csv is empty; the first line of a CSV file must have the names"),
        (["notes.txt"], "notes.txt must end with .parquet, .arrow, .jsonl, .csv"),
        (["folder"], "folder has no file that ends with"),
        (["twice.arrow"], "twice.arrow has several columns with the name 'q'; rename all but one"),
        (["outside"], "`splits` must have names in its folder, got '../folder'"),
    ],
)
def test_files_that_cannot_be_rows_are_named(tmp_path: Path, paths: list[str], message: str) -> None:
    for name in ("wrong.parquet", "wrong.arrow"):
        (tmp_path / name).write_text("neither of them")
    for name in ("notes.txt", "empty.csv"):
        (tmp_path / name).write_text("")
    write_table(tmp_path / "twice.arrow", pa.Table.from_arrays([pa.array(["a"])] * 2, names=["q", "q"]))
    (tmp_path / "mark.csv").write_bytes(b"\xef\xbb\xbf")
    for name in ("folder", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "dataset_dict.json").write_text('{"splits": ["../folder"]}')
    with pytest.raises(ConfigError, match=message):
        open_rows(paths, base_dir=tmp_path)
