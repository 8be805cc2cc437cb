"""Files in and out of a session, handled inside its jail: path tricks reach no further than the session's own directory.

The service trusts what it gets no more than anything else from a jail. What is guarded here is the session's own pid 1, which
foreign code races: every component of a path is opened by itself without following symbolic links, only regular files are read
or written, a pipe or device can't make it wait, and sizes are bounded before anything is read.
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
    """Write base64 contents by relative path; nothing to send back. Raises OSError, ValueError."""
    for path, content in files.items():
        fd = _open(root, path, os.O_WRONLY | os.O_CREAT, make_folders=True)
        with open(fd, "wb") as file:
            file.truncate(0)
            file.write(base64.b64decode(content))
    return {}


def get(paths: Sequence[str], bytes_max: int, root: str = "") -> dict[str, str]:
    """Read regular files as base64. Raises ValueError for one that is missing, no regular file, or beyond `bytes_max` in all."""
    files: dict[str, str] = {}
    room = bytes_max
    for path in paths:
        content = _read(root, path, room + 1)
        room -= len(content)
        if room < 0:
            raise ValueError(f"{path}: the files asked for exceed {bytes_max} bytes together")
        files[path] = base64.b64encode(content).decode()
    return files


def collect(paths: Sequence[str], bytes_max: int, root: str = "") -> tuple[dict[str, str], bool]:
    """What there is of the files asked for, as base64, cut where `bytes_max` in all is reached; whether anything was cut."""
    files: dict[str, str] = {}
    room, cut = bytes_max, False
    for path in dict.fromkeys(paths):
        try:
            content = _read(root, path, room + 1)
        except (OSError, ValueError):
            continue  # absent, or something that is not given out
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
            raise ValueError(f"{path}: no such file, or a symbolic link on the way to it") from None
        raise
    with open(fd, "rb") as file:
        return file.read(bytes_max)


def _open(root: str, path: str, flags: int, *, make_folders: bool = False) -> int:
    """Open a regular file below `root` (empty: the private directory), component by component. Raises OSError, ValueError."""
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
    """The descriptor of a folder in exchange for its parent's."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=at)
    inner = os.open(folder, _FOLDER, dir_fd=at)
    os.close(at)
    return inner


def require_plain(path: str) -> None:
    """Raises ValueError for a path that `get` and `put` would not take."""
    _components(path)


def _components(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r}: file paths must be relative and without '..'")
    if len(parts) > _DEPTH_MAX:
        raise ValueError(f"{path!r}: more than {_DEPTH_MAX} folders deep")
    return parts
