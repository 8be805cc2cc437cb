"""A seccomp filter assembled by hand: which system calls a session may not make.

A deny list: everything that reaches other processes' memory, mounts, namespaces, kernel modules, keys, clocks, BPF, io_uring,
unaccounted memory (memfd, System V) or a socket answers EPERM; `clone3` answers ENOSYS, since its flags lie in memory the
filter can't read and libc then falls back to `clone`, whose flags are checked. A foreign architecture's calls kill the
process. Not covered: a kernel bug behind a call that is allowed.

Numbers are of asm/unistd_64.h (x86_64) and asm-generic/unistd.h (aarch64).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from rollmesh.sandbox_runtime import namespaces, syscalls

_SET_MODE_FILTER = 1
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH = 0, 4
_X32_BIT = 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_NAMESPACE_FLAGS = namespaces.APART | namespaces.CLONE_NEWPID | namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWCGROUP

_SAME_NUMBER = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip

_DENIED = {
    "x86_64": _SAME_NUMBER | {
        "shmget": 29, "socket": 41, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "uselib": 134,
        "personality": 135, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161,
        "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
        "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
        "quotactl": 179, "io_setup": 206, "lookup_dcookie": 212, "clock_settime": 227, "mbind": 237,
        "set_mempolicy": 238, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": _SAME_NUMBER | {
        "io_setup": 0, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60,
        "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
        "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
        "settimeofday": 170, "adjtimex": 171, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198,
        "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "mbind": 235,
        "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip

_ARCHITECTURE = {"x86_64": (0xC000003E, 56, 16), "aarch64": (0xC00000B7, 220, 29)}
"""AUDIT_ARCH and the numbers of clone and ioctl."""
_CLONE3 = 435


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _argument(index: int) -> int:
    """Offset of the low half of an argument in `struct seccomp_data`; both architectures are little-endian."""
    return 16 + 8 * index


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def assemble(machine: str) -> bytes:
    """The filter for an architecture, 8 bytes per instruction; raises OSError where no table exists."""
    if machine not in _DENIED:
        raise OSError(f"no seccomp table for {machine}; known: {', '.join(_DENIED)}")
    audit_arch, clone, ioctl = _ARCHITECTURE[machine]
    out = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JEQ, audit_arch, if_true=1),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
        _instruction(_JEQ, _CLONE3, if_false=1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    denied = sorted(_DENIED[machine].values())
    out.append(_instruction(_JGE, _X32_BIT, if_true=len(denied) + 8))
    # Jumps are relative and at most 255 long: what follows is denied ones, 8 instructions on arguments, then the verdict.
    out += [_instruction(_JEQ, value, if_true=len(denied) - index + 7) for index, value in enumerate(denied)]
    out += [
        _instruction(_JEQ, clone, if_false=2),
        _instruction(_LOAD, _argument(0)),
        _instruction(_JSET, _NAMESPACE_FLAGS, if_true=5, if_false=4),
        _instruction(_JEQ, ioctl, if_false=3),
        _instruction(_LOAD, _argument(1)),
        _instruction(_JEQ, _TIOCSTI, if_true=2),
        _instruction(_JEQ, _TIOCLINUX, if_true=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
    ]
    return b"".join(out)


def install(program: bytes | None = None) -> None:
    """Filter this process and all it will start, for good. Needs no_new_privs. `program` is `assemble`'s, made beforehand."""
    code = program if program is not None else assemble(platform.machine())
    header = _Program(length=len(code) // 8, filter=code)
    syscalls.call("seccomp", _SET_MODE_FILTER, 0, ctypes.byref(header))
