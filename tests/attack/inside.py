"""Names for every attack. Read as text and prepended to its source; never imported."""
# ruff: noqa: F401 - for the attacks

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "mmap": 9, "shmget": 29, "shmat": 30, "socket": 41, "setsockopt": 54, "clone": 56, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
    "personality": 135, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "sync": 162, "acct": 163, "settimeofday": 164,
    "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169, "sethostname": 170, "iopl": 172, "ioperm": 173,
    "init_module": 175, "delete_module": 176, "quotactl": 179, "io_setup": 206, "fadvise64": 221, "clock_settime": 227, "mq_open": 240, "mq_unlink": 241,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251, "inotify_init1": 294, "inotify_add_watch": 254,
    "unshare": 272, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "syncfs": 306,
    "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319,
    "bpf": 321, "execveat": 322, "userfaultfd": 323, "preadv2": 327, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
"""Numbers of x86_64."""


def raw(name: str, *arguments: Any) -> int:
    """Make a system call by name, without libc's wrapper."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    value: int = _libc.syscall(ctypes.c_long(NUMBERS[name]), *wide)
    if value == -1:
        raise OSError(ctypes.get_errno(), name)
    return value


def libc(name: str, *arguments: Any) -> Any:
    """Call a function of the C library that returns -1 for an error."""
    value = getattr(_libc, name)(*arguments)
    if value == -1:
        raise OSError(ctypes.get_errno(), name)
    return value


def probe(label: str, action: Callable[[], object]) -> None:
    """Try an action and print one line: the errno, the exception, or the result."""
    try:
        value = action()
    except OSError as error:
        print(label, errno.errorcode.get(error.errno or 0, str(error)), flush=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        print(label, type(error).__name__, flush=True)
    else:
        print(label, "got", ascii(value)[:60], flush=True)


def in_child(action: Callable[[], object]) -> tuple[str, int]:
    """Run an action in a forked child and return its output and wait status, for actions that may kill or change their
    process."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            value = action()
            os.write(writer, ascii(value).encode())
        except OSError as error:
            os.write(writer, errno.errorcode.get(error.errno or 0, "?").encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    return said, os.waitpid(pid, 0)[1]


def read(path: str, num_bytes: int = 64) -> bytes:
    with open(path, "rb") as file:
        return file.read(num_bytes)


def write(path: str, content: bytes = b"attacked") -> int:
    with open(path, "wb") as file:
        return file.write(content)


def run_program(*arguments: str) -> tuple[int, str, str]:
    import subprocess

    done = subprocess.run(arguments, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout[:200], done.stderr[:200]
