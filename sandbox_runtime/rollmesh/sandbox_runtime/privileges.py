"""Privileges: uid and groups dropped, every capability set emptied, no new ones by exec, death with the parent."""

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
    """SIGKILL for this process when its parent's thread ends. Cleared by a change of uid: call it after one."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")


def become(uid: int, gid: int) -> None:
    """Drop to one plain uid and gid without supplementary groups, for good."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def drop_bounding_set() -> None:
    """No exec'ed file can bring a capability back. Stops at the first number the kernel doesn't know."""
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
    """setuid bits and file capabilities have no effect from here on; seccomp requires it of the unprivileged."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
