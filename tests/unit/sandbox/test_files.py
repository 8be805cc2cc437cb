"""Files of a session: reading, writing, and rejected path tricks."""

from __future__ import annotations

import base64
import os
import threading
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime import files


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_files_in_folders_come_back(tmp_path: Path) -> None:
    files.put({"a/b/c.bin": encoded(b"\0\xff"), "a/b/d": encoded(b"")}, str(tmp_path))
    assert files.get(["a/b/c.bin", "a/b/d"], 2, str(tmp_path)) == {"a/b/c.bin": encoded(b"\0\xff"), "a/b/d": ""}


def test_a_shorter_file_replaces_a_longer_one_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "tool.sh").write_bytes(b"long content")
    (tmp_path / "tool.sh").chmod(0o755)
    files.put({"tool.sh": encoded(b"x")}, str(tmp_path))
    assert (tmp_path / "tool.sh").read_bytes() == b"x"
    assert (tmp_path / "tool.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b", "/".join("d" * 40)])
def test_paths_that_lead_out_or_nowhere_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="relative|deep"):
        files.get([path], 10, str(tmp_path))
    with pytest.raises(ValueError, match="relative|deep"):
        files.put({path: ""}, str(tmp_path))


@pytest.mark.parametrize("path", ["link", "folder/passwd"])
def test_symbolic_links_are_followed_neither_at_the_end_nor_on_the_way(tmp_path: Path, path: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "passwd").write_text("secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside / "passwd")
    (root / "folder").symlink_to(outside)
    with pytest.raises(ValueError, match="no such file"):
        files.get([path], 100, str(root))
    with pytest.raises(OSError, match="symbolic links|Not a directory"):
        files.put({path: encoded(b"mine")}, str(root))
    assert files.collect([path], 100, str(root)) == ({}, False)
    assert (outside / "passwd").read_text() == "secret"


def test_a_pipe_or_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ValueError, match="not a regular file"):
            files.get([name], 10, str(tmp_path))
    with pytest.raises(OSError, match="No such device"):
        files.put({"pipe": encoded(b"x")}, str(tmp_path))
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ValueError, match="not a regular file"):
        files.put({"pipe": encoded(b"x")}, str(tmp_path))
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_sizes_are_bounded_before_reading(tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    with pytest.raises(ValueError, match="exceed 100 bytes"):
        files.get(["huge"], 100, str(tmp_path))
    assert files.collect(["huge"], 100, str(tmp_path)) == ({"huge": encoded(bytes(100))}, True)


def test_collect_leaves_out_what_is_absent_and_cuts_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"67890")
    found = files.collect(["a", "none", "a", "b"], 7, str(tmp_path))
    assert found == ({"a": encoded(b"12345"), "b": encoded(b"67")}, True)
    assert files.collect(["a", "b"], 10, str(tmp_path))[1] is False


def test_a_folder_swapped_for_a_link_meanwhile_never_gives_out_what_lies_behind_it(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "real", outside):
        folder.mkdir(parents=True)
    (root / "real" / "f").write_text("mine")
    (outside / "f").write_text("secret")
    (root / "link").symlink_to(outside)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            os.rename(root / "real", root / "kept")
            os.rename(root / "link", root / "real")
            os.rename(root / "real", root / "link")
            os.rename(root / "kept", root / "real")

    racer = threading.Thread(target=swap)
    racer.start()
    try:
        seen = {files.collect(["real/f"], 100, str(root))[0].get("real/f") for _ in range(500)}
    finally:
        done.set()
        racer.join()
    assert seen <= {encoded(b"mine"), None}
    assert files.collect(["real/f"], 100, str(root))[0] == {"real/f": encoded(b"mine")}
