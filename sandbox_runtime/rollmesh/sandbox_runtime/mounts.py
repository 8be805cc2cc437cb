"""The jail's file system: a read-only root, built once per zygote, and one private tmpfs per session.

The root is a small tmpfs with read-only binds of the system's programs and libraries, the interpreter's prefix and the
declared library paths, five device nodes and a synthetic /etc. The host's root is detached from the namespace, so
everything else (/etc/shadow, home directories, the repository, /proc, /sys, /run, other disks) does not exist, rather
than being forbidden. The copy of the mount tree for a session then costs only these few mounts instead of the host's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from rollmesh.sandbox_runtime import syscalls

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_ATTR_RDONLY = 0x1
_ATTR_NOSUID = 0x2

PRIVATE_DIR = "/session"
"""The session's working, home and temporary directory."""
STDIN_NAME = ".stdin"
"""File in the private directory to which /dev/stdin points, because without /proc the descriptor has no name."""

_TERMINALS = "/dev/pts"
PTMX = _TERMINALS + "/ptmx"
"""Opens a terminal of the session; missing if the host does not allow the mount."""

_BASE = "/tmp"
_OLD_ROOT = "/.host"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_TERMINALS_OPTIONS = "newinstance,ptmxmode=0666,max=8"
_PASSWD = "nobody:x:65534:65534:nobody:/session:/bin/sh\n"


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def build_root(read_only: Iterable[str]) -> None:
    """Replace the root of this mount namespace. Afterwards only the paths in the module docstring exist.

    The new root is mounted over /tmp and entered first. Binds then come from the old root below it, where the content
    of /tmp is visible again, so that a library path below /tmp works too.
    """
    syscalls.mount("none", "/", "", MS_REC | MS_PRIVATE)
    syscalls.mount("tmpfs", _BASE, "tmpfs", MS_NOSUID, "size=1m,nr_inodes=1024,mode=0755")
    os.mkdir(_BASE + _OLD_ROOT)
    syscalls.call("pivot_root", _BASE.encode(), (_BASE + _OLD_ROOT).encode())
    os.chdir("/")
    _fill(read_only)
    syscalls.umount(_OLD_ROOT, MNT_DETACH)
    os.rmdir(_OLD_ROOT)
    _freeze("/")


def _fill(read_only: Iterable[str]) -> None:
    for path in (*SYSTEM, *DEVICES):
        _bind(path)
    for path in sorted(set(read_only)):
        if not any(path == known or path.startswith(known + "/") for known in SYSTEM):
            _bind(path)
    os.makedirs("/etc", exist_ok=True)
    for name, text in (("passwd", _PASSWD), ("group", "nogroup:x:65534:\n"), ("hosts", "")):
        with open(f"/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)
    os.mkdir(PRIVATE_DIR)
    os.mkdir(_TERMINALS)
    os.symlink("pts/ptmx", "/dev/ptmx")
    os.symlink(f"{PRIVATE_DIR}/{STDIN_NAME}", "/dev/stdin")
    for name in ("/tmp", "/dev/shm"):
        if not os.path.lexists(name):  # a library path below /tmp makes /tmp a plain read-only directory
            os.symlink(PRIVATE_DIR, name)


def _bind(path: str) -> None:
    """Bind the host's `path` to the same path. A missing one is skipped, and a symlink is copied."""
    source = _OLD_ROOT + path
    if not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    syscalls.mount(source, path, "", MS_BIND | MS_REC)


def _freeze(path: str) -> None:
    """Make the whole tree read-only and nosuid. mount_setattr only adds flags, so locked flags of a user namespace
    remain."""
    attr = _MountAttr(attr_set=_ATTR_RDONLY | _ATTR_NOSUID)
    syscalls.call("mount_setattr", _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(attr), ctypes.sizeof(attr))


def mount_private_dir(*, bytes_max: int, inodes_max: int, uid: int, gid: int) -> None:
    """Mount the session's writable directory, bounded in bytes and files. It disappears with the last process of the
    namespace."""
    data = f"size={bytes_max},nr_inodes={inodes_max},mode=0700,uid={uid},gid={gid}"
    syscalls.mount("tmpfs", PRIVATE_DIR, "tmpfs", MS_NOSUID | MS_NODEV, data)


def mount_terminals() -> None:
    """Mount pseudo-terminals for the session's shells. This is a convenience: if the host rejects the mount, the
    session has none."""
    try:
        syscalls.mount("devpts", _TERMINALS, "devpts", MS_NOSUID | MS_NOEXEC, _TERMINALS_OPTIONS)
    except OSError:
        return
