"""Transfer files into and out of a session, inside its jail, so that path tricks cannot leave the session's directory.

The service does not trust the result. This module protects the session's own pid 1 against races with foreign code:
each path component is opened separately without following symbolic links, only regular files are read or written, a
pipe or device cannot block it, and sizes are bounded before reading.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import stat
from collections.abc import Mapping, Sequence

from rollmesh.sandbox_runtime import process_env

_DEPTH_MAX = 32
_COMMON = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _COMMON
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


def put(files: Mapping[str, str], root: str = "") -> dict[str, str]:
    """Write base64 contents by relative path. Return no files. Raises OSError, ValueError."""
    for path, content in files.items():
        fd = _open(root, path, os.O_WRONLY | os.O_CREAT, make_folders=True)
        with open(fd, "wb") as file:
            file.truncate(0)
            file.write(base64.b64decode(content))
    return {}


def get(paths: Sequence[str], bytes_max: int, root: str = "") -> dict[str, str]:
    """Read regular files as base64. Raises ValueError if one is missing or not a regular file, or if they exceed
    `bytes_max` in total."""
    files: dict[str, str] = {}
    room = bytes_max
    for path in paths:
        content = _read(root, path, room + 1)
        room -= len(content)
        if room < 0:
            raise ValueError(f"{path}: the requested files exceed {bytes_max} bytes in total")
        files[path] = base64.b64encode(content).decode()
    return files


def collect(paths: Sequence[str], bytes_max: int, root: str = "") -> tuple[dict[str, str], bool]:
    """Return the existing ones of the requested files as base64, cut at `bytes_max` in total, and whether any was
    cut."""
    files: dict[str, str] = {}
    room, cut = bytes_max, False
    for path in dict.fromkeys(paths):
        try:
            content = _read(root, path, room + 1)
        except (OSError, ValueError):
            continue  # missing, or not a regular file
        cut = cut or len(content) > room
        content = content[:room]
        room -= len(content)
        files[path] = base64.b64encode(content).decode()
    return files, cut


def _read(root: str, path: str, bytes_max: int) -> bytes:
    try:
        fd = _open(root, path, os.O_RDONLY)
    except OSError as error:
        if error.errno in _ABSENT:
            raise ValueError(f"{path}: no such file, or a symbolic link in its path") from None
        raise
    with open(fd, "rb") as file:
        return file.read(bytes_max)


def _open(root: str, path: str, flags: int, *, make_folders: bool = False) -> int:
    """Open a regular file below `root` (empty: the private directory), component by component. Raises OSError,
    ValueError."""
    *folders, name = _components(path)
    at = os.open(root or process_env.private_dir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            at = _enter(at, folder, make=make_folders)
        fd = os.open(name, flags | _COMMON, 0o644, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path}: not a regular file")
    return fd


def _enter(at: int, folder: str, *, make: bool) -> int:
    """Close the descriptor of a directory and return that of its subdirectory."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=at)
    inner = os.open(folder, _FOLDER, dir_fd=at)
    os.close(at)
    return inner


def require_plain(path: str) -> None:
    """Raise ValueError for a path that `get` and `put` would reject."""
    _components(path)


def _components(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r}: file paths must be relative and without '..'")
    if len(parts) > _DEPTH_MAX:
        raise ValueError(f"{path!r}: more than {_DEPTH_MAX} folders deep")
    return parts
