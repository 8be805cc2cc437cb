"""Install a seccomp filter, which defines the system calls that a session may make.

The service compiles the filter once per node (`rollmesh.services.sandbox.seccomp_policy`) and sends it with the
launcher's settings as classic BPF. This module only passes it to the kernel.
"""

from __future__ import annotations

import ctypes

from rollmesh.sandbox_runtime import syscalls

_SET_MODE_FILTER = 1
_INSTRUCTION_BYTES = 8
_INSTRUCTIONS_MAX = 4096


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(program: bytes) -> None:
    """Filter this process and all its future children, permanently. Needs no_new_privs. Raises OSError, ValueError."""
    count, rest = divmod(len(program), _INSTRUCTION_BYTES)
    if rest or not 0 < count <= _INSTRUCTIONS_MAX:
        raise ValueError(f"{len(program)} bytes are not a seccomp filter")
    header = _Program(length=count, filter=program)
    syscalls.call("seccomp", _SET_MODE_FILTER, 0, ctypes.byref(header))
