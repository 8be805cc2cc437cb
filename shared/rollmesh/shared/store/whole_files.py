"""Files that are whole or absent: a crash, a full disk or a reader in between sees the old content or the new one.

The content is written under a temporary name beside the file, stored on the disk, and renamed. A repeated write
overwrites what a crash left; an error removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.shared.store.private_files import private_opener

PARTIAL_SUFFIX = ".partial"


@contextmanager
def whole_file(path: Path, *, private: bool = True) -> Iterator[Path]:
    """Yield an empty file with a temporary name. If the context is left without an error, store it on the disk and
    rename it to `path`. `private` means that only its owner can read it. Raise OSError."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        open(partial, "wb", opener=private_opener if private else None).close()
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, content: bytes, *, private: bool = True) -> None:
    """Write a file as `whole_file` does."""
    with whole_file(path, private=private) as partial:
        partial.write_bytes(content)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
