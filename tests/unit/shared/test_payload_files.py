"""Payload files: what a position holds, and what a damaged file, a full limit and a killed writer leave behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from rollmesh.shared.bus.bus import StreamFull, UnknownStream
from rollmesh.shared.bus.payload_writer import FILE_BYTES_MIN, PayloadWriter
from rollmesh.shared.errors import DiskFull, PayloadTooLarge
from rollmesh.shared.store.payload_files import (
    FIRST_SEQUENCE,
    RECORD_BYTES_MAX,
    NoPayloadFile,
    PayloadFiles,
    UnreadableRecord,
    file_of,
    in_file,
    record_header,
)

LIMIT = 1 << 20


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_payloads_are_read_back_at_their_positions(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    writer = PayloadWriter(files, bytes_max=LIMIT)
    payloads = [os.urandom(n) for n in (0, 1, 5000)]
    positions = writer.append(payloads) + writer.append([b"later"])
    assert [files.read(at) for at in positions] == [*payloads, b"later"]
    assert all(in_file(at) and at < 1 << 63 for at in positions)
    assert not in_file(FIRST_SEQUENCE - 1)


def test_each_writer_has_files_with_new_numbers(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    first, second = (PayloadWriter(files, bytes_max=LIMIT) for _ in range(2))
    numbers = {file_of(writer.append([b"x"])[0]) for writer in (first, second)}
    first.close()
    numbers.add(file_of(first.append([b"y"])[0]))
    assert len(numbers) == 3
    assert set(files.sizes()) == numbers


def test_a_writer_begins_a_file_when_one_has_its_share_of_the_limit(tmp_path: Path) -> None:
    writer = PayloadWriter(PayloadFiles(tmp_path), bytes_max=LIMIT)
    (full,) = writer.append([bytes(FILE_BYTES_MIN)])
    (current,) = writer.append([b"x"])
    assert file_of(current) != file_of(full)


def test_no_other_user_can_read_a_file(tmp_path: Path) -> None:
    PayloadWriter(PayloadFiles(tmp_path), bytes_max=LIMIT).append([b"x"])
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_a_removed_file_is_not_appended_to(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    writer = PayloadWriter(files, bytes_max=LIMIT)
    (first,) = writer.append([b"x"])
    files.remove(file_of(first))
    (second,) = writer.append([b"y"])
    assert files.read(second) == b"y"
    with pytest.raises(NoPayloadFile, match="does not exist"):
        files.read(first)
    writer.close()
    files.remove(file_of(second))
    files.remove(max(files.sizes()))
    assert set(files.sizes().values()) == {0}, "an empty file keeps the newest number"
    assert file_of(writer.append([b"z"])[0]) > file_of(second)


def test_the_limit_holds_for_all_writers_until_a_file_is_removed(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    one, other = (PayloadWriter(files, bytes_max=LIMIT) for _ in range(2))
    (first,) = one.append([bytes(LIMIT // 2)])
    with pytest.raises(StreamFull, match=r"the limit is 1048576 \(coordinator.streams.samples_bytes_max\)"):
        other.append([bytes(LIMIT // 2)])
    with pytest.raises(StreamFull):
        one.append([bytes(LIMIT // 2)])
    files.remove(file_of(first))
    assert files.read(other.append([b"x" * (LIMIT // 2)])[0]) == b"x" * (LIMIT // 2)


def test_a_full_disk_is_back_pressure_and_leaves_no_part_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PayloadFiles(tmp_path)
    writer = PayloadWriter(files, bytes_max=LIMIT)
    writer.append([b"x"])
    size = only_file(tmp_path).stat().st_size

    def fails_half_way(descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) < 900:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data[:100], offset)

    pwrite = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails_half_way)
        with pytest.raises(DiskFull, match="no space left"):
            writer.append([bytes(900)])
    assert only_file(tmp_path).stat().st_size == size
    assert files.read(writer.append([b"y"])[0]) == b"y"


def test_a_real_quota_is_back_pressure(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a child process stands for a disk that takes half of a record."""
    queue = multiprocessing.get_context("spawn").Queue()
    child = multiprocessing.get_context("spawn").Process(target=_append_over_the_quota, args=(tmp_path, queue))
    child.start()
    said = queue.get(timeout=30)
    child.join(30)
    assert "File too large" in said
    assert only_file(tmp_path).stat().st_size == 0


def _append_over_the_quota(folder: Path, queue: multiprocessing.Queue[str]) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        PayloadWriter(PayloadFiles(folder), bytes_max=LIMIT).append([bytes(5000)])
        queue.put("stored")
    except OSError as error:
        queue.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda b: b[:-1], "has 999 of 1000 bytes"),
        (lambda b: b[:10], "ends before offset 0"),
        (lambda b: b[:-1] + b"!", "another checksum"),
        (lambda b: b"XXXX" + b[4:], "no record begins"),
        (lambda b: b"", "ends before offset 0"),
    ],
)
def test_a_damaged_record_is_unreadable_with_its_cause(tmp_path: Path, damage, why: str) -> None:  # type: ignore[no-untyped-def]
    files = PayloadFiles(tmp_path)
    (at,) = PayloadWriter(files, bytes_max=LIMIT).append([bytes(1000)])
    path = only_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnreadableRecord, match=why):
        files.read(at)


def test_an_invented_position_reads_nothing(tmp_path: Path) -> None:
    """A worker reports any number: it names a record of this run or none, and never another file."""
    folder = tmp_path / "r"
    folder.mkdir()
    files = PayloadFiles(folder)
    inner = PayloadWriter(files, bytes_max=LIMIT)
    (at,) = inner.append([bytes(100)])
    forged = record_header(at + 24, b"forged") + b"forged"
    (other,) = inner.append([forged])
    for position in (at + 1, at + 4, other + 20, FIRST_SEQUENCE - (1 << 28), (1 << 63) - 1, at + (1 << 28)):
        with pytest.raises((NoPayloadFile, UnreadableRecord)):
            files.read(position)
    secret = tmp_path / "secret"
    secret.write_bytes(only_file(folder).read_bytes())
    link = folder / f"{file_of(at) + 1:08d}.payloads"
    link.symlink_to(secret)
    with pytest.raises(UnreadableRecord, match="cannot open"):
        files.read(at + (1 << 28))
    os.mkfifo(folder / f"{file_of(at) + 2:08d}.payloads")
    with pytest.raises(UnreadableRecord, match="is not a file"):
        files.read(at + (2 << 28))


def test_a_payload_above_the_limit_of_a_record_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(PayloadTooLarge, match="exceeds"):
        PayloadWriter(PayloadFiles(tmp_path), bytes_max=1 << 30).append([bytes(RECORD_BYTES_MAX + 1)])


def test_a_writer_does_not_create_the_folder_of_a_deleted_run(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path / "r")
    with pytest.raises(UnknownStream, match="was deleted"):
        PayloadWriter(files, bytes_max=LIMIT).append([b"x"])
    assert not files.folder.exists()
    assert files.sizes() == {}


def test_what_a_killed_writer_has_stored_is_read_and_its_file_is_not_continued(tmp_path: Path) -> None:
    """SIGKILL in the middle of appends: each acknowledged record is whole."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_append_forever, args=(tmp_path, queue))
    child.start()
    stored = [queue.get(timeout=30) for _ in range(20)]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    files = PayloadFiles(tmp_path)
    assert all(files.read(at) == bytes([at % 251]) * size for at, size in stored)
    (next_at,) = PayloadWriter(files, bytes_max=1 << 30).append([b"x"])
    assert file_of(next_at) > max(file_of(at) for at, _ in stored)


def _append_forever(folder: Path, queue: multiprocessing.Queue[tuple[int, int]]) -> None:
    files = PayloadFiles(folder)
    writer = PayloadWriter(files, bytes_max=1 << 30)
    size = 50_000
    writer.append([b""])
    while True:
        guess = (writer._number << 28) + writer._end
        (at,) = writer.append([bytes([guess % 251]) * size])
        if at == guess:
            queue.put((at, size))


def test_kept_payloads_are_read_at_their_positions_after_their_file_is_removed(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    writer = PayloadWriter(files, bytes_max=LIMIT)
    wanted, other, last, end = writer.append([b"wanted", bytes(30_000), b"wanted too", b"other"])
    number = file_of(wanted)
    for _ in range(2):  # a coordinator that was killed in between does it again
        files.keep(number, lambda payload: payload.startswith(b"wanted"))
    files.remove(number)
    assert (files.read(wanted), files.read(last)) == (b"wanted", b"wanted too")
    for purged in (other, end):
        with pytest.raises(NoPayloadFile, match="is purged"):
            files.read(purged)
    with pytest.raises(UnreadableRecord, match="no record begins"):
        files.read(wanted + 1)
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.stat().st_blocks * 512 < 30_000, "the copy has holes"
    assert number not in files.sizes(), "kept payloads do not count for the limit of the writers"


def test_a_whole_file_is_kept_under_another_name_and_its_writer_begins_another(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    writer = PayloadWriter(files, bytes_max=LIMIT)
    first, second = writer.append([b"first", b"second"])
    path = tmp_path / f"{file_of(first):08d}.payloads"
    inode = path.stat().st_ino
    for _ in range(2):
        files.keep(file_of(first))
    files.remove(file_of(first))
    assert (files.read(first), files.read(second)) == (b"first", b"second")
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.stat().st_ino == inode
    size = kept.stat().st_size
    (third,) = writer.append([b"third"])
    assert file_of(third) != file_of(first)
    assert kept.stat().st_size == size


def test_no_link_is_made_while_a_writer_may_not_notice_it(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    (first,) = PayloadWriter(files, bytes_max=LIMIT).append([b"first"])
    files.keep(file_of(first), may_link=False)
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.stat().st_nlink == 1


def test_a_file_system_without_hard_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refused)
    files = PayloadFiles(tmp_path)
    (first,) = PayloadWriter(files, bytes_max=LIMIT).append([b"first"])
    files.keep(file_of(first))
    files.remove(file_of(first))
    assert files.read(first) == b"first"
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".payloads"]


def test_a_file_without_wanted_or_whole_records_leaves_no_copy(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    writer = PayloadWriter(files, bytes_max=LIMIT)
    (first,) = writer.append([b"x"])

    def fails(payload: bytes) -> bool:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        files.keep(file_of(first), fails)
    files.keep(file_of(first), lambda payload: False)
    path = tmp_path / f"{file_of(first):08d}.payloads"
    path.write_bytes(b"\xff" * path.stat().st_size)
    files.keep(file_of(first), lambda payload: True)
    assert list((tmp_path / "kept").iterdir()) == []


def test_the_oldest_kept_files_are_removed_beyond_their_limit(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    positions = []
    for _ in range(3):
        writer = PayloadWriter(files, bytes_max=LIMIT)
        positions += writer.append([os.urandom(8000)])
        writer.close()
        files.keep(file_of(positions[-1]), lambda payload: True)
        files.remove(file_of(positions[-1]))
    files.limit_kept(20_000)
    with pytest.raises(NoPayloadFile):
        files.read(positions[0])
    assert all(files.read(position) for position in positions[1:])
