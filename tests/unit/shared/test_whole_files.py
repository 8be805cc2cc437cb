"""A file is whole or absent: an error keeps the old content, and the content is on the disk before it has its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rollmesh.shared.store.whole_files import whole_file, write_whole


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_the_content_replaces_the_old_one_and_what_a_crash_left(tmp_path: Path, private: bool, mode: int) -> None:
    path, before = tmp_path / "state.json", os.umask(0o022)
    try:
        path.write_bytes(b"old and longer")
        if private:
            (tmp_path / "state.json.partial").write_bytes(b"of a killed process")
            (tmp_path / "state.json.partial").chmod(0o600)
        write_whole(path, b"new", private=private)
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_keeps_the_old_content_and_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, b"old")

    def fail() -> None:
        with whole_file(path) as partial:
            partial.write_bytes(b"ne")
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_the_disk_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, a name without its content would be a malformed file."""
    seen: list[tuple[str, bool]] = []
    sync = os.fsync

    def synced(descriptor: Any) -> None:
        seen.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, (tmp_path / "state.json").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    write_whole(tmp_path / "state.json", b"new")
    assert seen == [("state.json.partial", False), (tmp_path.name, True)]
