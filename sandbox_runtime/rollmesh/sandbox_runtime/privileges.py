"""Privileges: drop uid and groups, empty every capability set, forbid new privileges by exec, and exit with the
parent."""

from __future__ import annotations

import ctypes
import os
import signal

from rollmesh.sandbox_runtime import syscalls

_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES_MAX = 64


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


_THIS_PROCESS = _Header(version=_CAPABILITY_VERSION_3, pid=0)
_EMPTY_SETS = (_Data * 2)()


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent's thread exits. A change of uid clears this, so call it
    afterwards."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")


def become(uid: int, gid: int) -> None:
    """Switch to one unprivileged uid and gid without supplementary groups, permanently."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def drop_bounding_set() -> None:
    """Empty the bounding set, so that no executed file can restore a capability. Stops at the first number that the
    kernel does not know."""
    for capability in range(_CAPABILITIES_MAX):
        try:
            syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability, "drop bounding set")
        except OSError:
            if capability == 0:
                raise
            return


def drop_capabilities() -> None:
    """Empty the ambient, effective, permitted and inheritable sets."""
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL, "clear ambient capabilities")
    syscalls.call("capset", ctypes.byref(_THIS_PROCESS), ctypes.byref(_EMPTY_SETS))


def no_new_privileges() -> None:
    """Disable setuid bits and file capabilities from here on; seccomp requires this from unprivileged processes."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
