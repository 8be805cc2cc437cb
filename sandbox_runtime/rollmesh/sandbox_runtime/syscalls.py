"""System calls that Python 3.11 does not wrap, through ctypes.

Every wrapper raises OSError with the name of the step, so that the error of a jail names the mechanism that failed. The
library is loaded as `PyDLL`, which keeps the interpreter lock: the callers are single-threaded, and releasing the lock
would cost more than the calls. Every session makes about thirty of these calls just after its fork, where each executed
line costs a copy of the pages that it touches, so these wrappers contain little Python.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import platform

_libc = ctypes.PyDLL(None, use_errno=True)
_ARGUMENTS_MAX = 6
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, *(ctypes.c_void_p,) * _ARGUMENTS_MAX)
"""The function is variadic in C, where a bare int would fill half a register. As void pointers ints, bytes and
references fill a whole one."""
_REST = (0,) * _ARGUMENTS_MAX

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_SAME = {
    "close_range": 436, "mount_setattr": 442,
    "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446,
}  # fmt: skip
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317} | _SAME,
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277} | _SAME,
}


@functools.cache
def number(name: str) -> int:
    """Return the number of a system call. Raises OSError on an architecture without a table."""
    table = _NUMBERS.get(platform.machine())
    if table is None:
        raise OSError(f"no system call table for {platform.machine()}; known: {', '.join(_NUMBERS)}")
    return table[name]


def check(result: int, step: str) -> int:
    """Convert -1 to an OSError with errno and the name of the step."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{step}: {os.strerror(code)}")
    return result


def call(name: str, *args: object, step: str = "") -> int:
    """Make a raw system call by name."""
    return check(_syscall(number(name), *args, *_REST[len(args) :]), step or name)


def prctl(option: int, value: int, step: str, extra: int = 0) -> None:
    """Call prctl(option, value, extra) with the remaining arguments zero, as the kernel requires for several
    options."""
    zero = ctypes.c_ulong(0)
    check(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(extra), zero, zero), step)


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its future children) into new namespaces."""
    check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Join the namespace behind `fd`."""
    check(_libc.setns(fd, kind), f"setns({kind:#x})")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Call mount(2)."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(result, f"mount {kind or 'bind'} {source} on {target}")


def umount(target: str, flags: int) -> None:
    """Call umount2(2)."""
    check(_libc.umount2(target.encode(), flags), f"umount {target}")


def duplicate(fd: int, lowest: int) -> int:
    """Return a copy of `fd` with a number of at least `lowest`, closed on exec. `fcntl.fcntl` would first raise and
    catch an error, because its third argument is not bytes."""
    return check(_libc.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest), "dup")


def sethostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    raw = name.encode()
    check(_libc.sethostname(raw, len(raw)), "sethostname")
