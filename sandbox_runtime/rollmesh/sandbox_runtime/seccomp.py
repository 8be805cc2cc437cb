"""Installing a seccomp filter: which system calls a session may make. Which ones that are is said by the service.

The filter is compiled outside the jail (`rollmesh.services.sandbox.seccomp_policy`), once per node, and comes with the
launcher's set-up as classic BPF; here it is only handed to the kernel.
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
    """Filter this process and all it will start, for good. Needs no_new_privs. Raises OSError, ValueError."""
    count, rest = divmod(len(program), _INSTRUCTION_BYTES)
    if rest or not 0 < count <= _INSTRUCTIONS_MAX:
        raise ValueError(f"{len(program)} bytes are no seccomp filter")
    header = _Program(length=count, filter=program)
    syscalls.call("seccomp", _SET_MODE_FILTER, 0, ctypes.byref(header))
