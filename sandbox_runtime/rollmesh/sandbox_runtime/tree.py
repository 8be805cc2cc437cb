"""A session's files as a tar stream, packed in one jail and unpacked in another; the service never parses it.

Regular files, directories and symbolic links are saved with permissions and times. Hard links become separate files.
Everything else (pipes, sockets, unreadable files) is reported as lost. Unpacking starts with an empty directory and
creates links last, so that nothing is ever written through one. Whatever an archive contains, it can write only where
the jail can: its private directory, bounded in bytes and files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from typing import IO, Any

from rollmesh.sandbox_runtime import process_env


def pack(out: Any, root: str = "") -> list[str]:
    """Write the tree below `root` to `out`. Return the paths that could not be saved. Raises OSError if the tree
    changes meanwhile."""
    root = root or process_env.private_dir()
    lost: list[str] = []
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for directory, directories, files in os.walk(root, onerror=lambda error: lost.append(_named(error.filename))):
            for name in sorted((*directories, *files)):
                path = os.path.join(directory, name)
                if not _add(archive, path, os.path.relpath(path, root)):
                    lost.append(_named(os.path.relpath(path, root)))
    return lost


def unpack(source: IO[bytes], root: str = "") -> None:
    """Create the tree below `root`, which is empty. Raises OSError, ValueError, tarfile.TarError."""
    root = root or process_env.private_dir()
    links: list[tuple[str, str]] = []
    modes: dict[str, int] = {}
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            path = os.path.join(root, _checked(member.name))
            if member.isdir():
                os.makedirs(path, exist_ok=True)
                modes[path] = member.mode
            elif member.issym():
                links.append((member.linkname, path))
            elif member.isreg():
                _write(archive, member, path)
    for target, path in links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path in reversed(modes):  # a directory may lack write permission, so its content comes first
        _set_mode(path, modes[path])


def _named(path: str) -> str:
    return f"<file {path}>"


def _add(archive: tarfile.TarFile, path: str, name: str) -> bool:
    status = os.lstat(path)
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(status.st_mode) & 0o777, status.st_mtime
    if stat.S_ISREG(status.st_mode):
        return _add_file(archive, member, path)
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
    else:
        return False
    archive.addfile(member)
    return True


def _add_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> bool:
    try:
        file = open(path, "rb", opener=_open_unfollowed)  # noqa: SIM115 - closed below; only opening may fail
    except PermissionError:
        return False
    with file:
        member.size = os.fstat(file.fileno()).st_size
        archive.addfile(member, file)
    return True


def _open_unfollowed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _checked(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise ValueError(f"the archive names {name!r}")
    return name


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    content = archive.extractfile(member)
    assert content is not None
    with open(path, "xb") as file:
        shutil.copyfileobj(content, file)
    _set_mode(path, member.mode)
    with contextlib.suppress(PermissionError):
        os.utime(path, (member.mtime, member.mtime))


def _set_mode(path: str, mode: int) -> None:
    """Set a mode. If the driver forbids this to sessions, the mode is lost, and the content is kept."""
    with contextlib.suppress(PermissionError):
        os.chmod(path, mode & 0o777)
