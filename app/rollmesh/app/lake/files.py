"""The files of exported samples, partitioned by run and update.

    FOLDER/run=NAME/update=12/part-0.parquet      the samples that update 12 trained
    FOLDER/run=NAME/update=none/part-0.parquet    samples with another end, in the order of the ledger

A file is written under a temporary name, and renamed when it is complete. Its metadata name what it has (`PartNote`),
so that a later export adds only what is missing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollmesh.app.lake.lineage import EndedTogether
from rollmesh.app.lake.rows import FORMAT, SCHEMA
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.formats import check_format
from rollmesh.shared.errors import ConfigError, FailedPrecondition
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.store.private_files import private_folder
from rollmesh.shared.store.whole_files import PARTIAL_SUFFIX, whole_file

FOLDER = "samples"
"""Folder of the files in the run folder."""
FILES = "run=*/update=*/*.parquet"
SCORES = f"scores=*/{FILES}"
"""Files of rewards that `rollmesh score` added, by the name of the scores. They have the names of the files of the
samples."""
UNTRAINED = "none"
"""Update of the samples that no update trained."""
KEY = b"rollmesh"
"""Key of the note in the metadata of a file."""
Note = TypeVar("Note", bound=msgspec.Struct)
_LOCK = "export.lock"


class FolderBusy(FailedPrecondition):
    """Another process writes to the folder."""

    reason = "EXPORT_FOLDER_BUSY"


class PartNote(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one file, in its metadata."""

    format: int = FORMAT
    run: str
    ledger: str
    """Hash of the first record of the ledger, which identifies the run."""
    digest: str = ""
    """Digest of the commit of the update; empty for samples that no update trained."""
    after: int = 0
    """Position `through` of the file before it in its folder; 0 for the first one."""
    through: int = 0
    """Position of the last record of the ledger whose ends are in this file."""
    hash: str = ""
    """Hash of that record, which identifies the ledger up to it."""
    num_rows: int = 0
    num_stored: int = 0
    """Number of rows with tokens and messages."""


class Partitions:
    """The folder of one run. Its files are complete at every moment."""

    def __init__(self, folder: Path, run: str) -> None:
        self.run = run
        self.folder = folder / f"run={run}"

    def notes(self) -> dict[Path, PartNote]:
        """Return the notes of all files. Raises ConfigError for a file that no export wrote, NewerFormat."""
        return {path: part_note(path) for path in sorted(self.folder.glob("update=*/*.parquet"))}

    @contextmanager
    def part(self, update: int | str, note: PartNote) -> Iterator[PartWriter]:
        """Write the next file of an update. It is complete when the context is left without an error."""
        folder = private_folder(self.folder / f"update={update}")
        numbers = [int(path.stem.removeprefix("part-")) for path in folder.glob("part-*.parquet")]
        path = folder / f"part-{max(numbers, default=-1) + 1}.parquet"
        with parquet_file(path, SCHEMA) as writer:
            part = PartWriter(writer, note)
            yield part
            writer.add_key_value_metadata({KEY: msgspec.json.encode(part.note)})


class PartWriter:
    """Rows of one file, and its note."""

    def __init__(self, writer: pq.ParquetWriter, note: PartNote) -> None:
        self._writer = writer
        self.note = note

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows as one row group."""
        self._writer.write_batch(pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA))
        self.note = msgspec.structs.replace(
            self.note,
            num_rows=self.note.num_rows + len(rows),
            num_stored=self.note.num_stored + sum(row["stored"] for row in rows),
        )

    def reaches(self, ended: EndedTogether) -> None:
        """Note that the ends up to this record of the ledger are in the file."""
        self.note = msgspec.structs.replace(self.note, through=ended.position, hash=ended.hash)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Create and own a folder, and remove what an interrupted call left there. Raises FolderBusy, ConfigError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        private_folder(folder)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as err:
        raise ConfigError(f"{folder}: cannot be written: {err.strerror}; name another folder") from err
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderBusy(f"{folder}: another call writes to it; wait until it ends") from None
        for path in folder.rglob(f"*{PARTIAL_SUFFIX}"):
            path.unlink()
        yield
    finally:
        os.close(descriptor)


@contextmanager
def parquet_file(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Write a Parquet file as `stored_file` does."""
    with (
        stored_file(path) as partial,
        open(partial, "wb") as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        yield writer


@contextmanager
def stored_file(path: Path) -> Iterator[Path]:
    """Yield a private file as `whole_file` does. Raises DiskFull."""
    with disk_full_errors(path.parent), whole_file(path) as partial:
        yield partial


def read_note(path: Path, of: type[Note]) -> Note:
    """Return the note in the metadata of a file. Raises ConfigError for a file that has none."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
        return msgspec.json.decode(metadata[KEY], type=of)
    except (OSError, pa.ArrowInvalid, KeyError, *UNDECODABLE) as err:
        raise ConfigError(
            f"{path}: not a file that rollmesh wrote ({err}); remove it, then repeat the command"
        ) from err


def part_note(path: Path) -> PartNote:
    """Return the note of a file of samples. Raises ConfigError, NewerFormat."""
    note = read_note(path, PartNote)
    check_format(str(path), note.format, FORMAT)
    return note
