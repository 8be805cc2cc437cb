"""The file of `rollmesh backup`: files that change while they are copied, and archives that are cut off or crafted."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.backup.backup import _copy
from rollmesh.app.backup.backup_file import (
    FORMAT,
    PART_BYTES,
    BackupAbout,
    BackupWriter,
    StreamPart,
    read_backup,
    verify_backup,
)
from rollmesh.shared.bus.bus import StreamInfo, StreamRecord
from rollmesh.shared.errors import ConfigError, DataLoss

ABOUT = BackupAbout(format=FORMAT, run="r", created_unix_s=0.0, config_yaml="", origin_json="", base_dir="/")


def written(path: Path) -> Path:
    """Write a backup without files, whose streams have no records."""
    with BackupWriter(path) as out:
        out.add(ABOUT)
        for kind in ("samples", "ledger", "dead"):
            out.add(StreamPart(kind=kind, first_seq=1, records=[]))
        out.finish()
    return path


class Shrinking(io.FileIO):
    """A file that loses its second half after its size was read."""

    def fileno(self) -> int:
        self.seek(self.seek(0, io.SEEK_END) // 2)
        return super().fileno()


def test_a_file_that_becomes_shorter_while_it_is_copied_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3000))
    with BackupWriter(tmp_path / "backup") as out:
        with (tmp_path / "file").open("rb") as file:
            assert out.add_file("same", file) == 3000
        with (
            Shrinking(str(tmp_path / "file")) as shrinking,
            pytest.raises(DataLoss, match="shrinks became shorter while it was copied; repeat the backup"),
        ):
            out.add_file("shrinks", shrinking)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "an incomplete backup is removed"


@pytest.mark.parametrize("length", [513, 600, 1500, 3000])
def test_a_backup_that_is_cut_off_is_damaged_also_in_its_first_member(tmp_path: Path, length: int) -> None:
    whole = written(tmp_path / "backup")
    verify_backup(whole)
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:length])
    with pytest.raises(DataLoss, match="damaged or cut off"):
        verify_backup(tmp_path / "cut")


@pytest.mark.parametrize("data", [b"", b"text" * 1000])
def test_another_file_is_not_a_backup(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(ConfigError, match="is not a file of `rollmesh backup`"):
        verify_backup(tmp_path / "other")


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


@pytest.mark.parametrize(
    "crafted",
    [
        member("files/sparse", pax_headers={"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 50)}),
        member("files/link", type=tarfile.LNKTYPE, linkname="about.json"),
        member("files/device", type=tarfile.CHRTYPE),
        member("samples/large.msgpack", pax_headers={"size": str(1 << 80)}),
    ],
    ids=lambda crafted: crafted[0].name,
)
def test_a_member_that_no_backup_has_is_rejected_before_it_is_read(
    tmp_path: Path, crafted: tuple[tarfile.TarInfo, bytes]
) -> None:
    bad = tmp_path / "bad"
    with tarfile.open(written(tmp_path / "backup")) as whole, tarfile.open(bad, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(whole.getmember("about.json"), whole.extractfile("about.json"))
        tar.addfile(crafted[0], io.BytesIO(crafted[1]))
    parts = read_backup(bad)
    assert next(parts) == ABOUT
    with pytest.raises(DataLoss, match="damaged or cut off"):
        next(parts)


class Log:
    """A stream of records without payload, as a restore writes for those that were purged."""

    async def info(self) -> StreamInfo:
        return StreamInfo(first_seq=1, last_seq=0, num_records=0, num_bytes=0, bytes_max=1)

    async def read_range(self, from_seq: int) -> AsyncIterator[StreamRecord]:
        for seq in range(1, 6):
            yield StreamRecord(seq=seq, payload=b"", msg_id="m" * (PART_BYTES // 2))


async def test_records_without_payload_count_towards_the_size_of_a_part() -> None:
    class OneBus:
        async def open(self, name: str) -> Log:
            return Log()

    class Parts(list[StreamPart]):
        add = list.append

    bus: Any = OneBus()
    parts: Any = Parts()
    assert await _copy(bus, "r", "samples", parts) == 5
    assert [len(part.records) for part in parts] == [2, 2, 1]
