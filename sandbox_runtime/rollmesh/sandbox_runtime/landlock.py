"""Landlock: what a process and its children may do with files, TCP ports and processes outside, decided by the process itself.

A second wall behind the mount and network namespaces, and the first where there are none. It needs no privilege, only
no_new_privs. What a kernel's version of it doesn't know is left out; `abi` says which version it is, and `lacks` what that means.
A rule holds for a directory and what is mounted below it, not for what is mounted on the directory itself afterwards.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from rollmesh.sandbox_runtime import syscalls

_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_FIRST_RIGHTS = (1 << 13) - 1
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE

_READ_ONLY = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICE = _READ_FILE | _WRITE_FILE | _READ_DIR | _TRUNCATE | _IOCTL_DEVICE
_OWN = ((1 << 16) - 1) & ~(_MAKE_CHAR | _MAKE_BLOCK)

_BIND_AND_CONNECT_TCP = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_SIGNALS = 0b10

SCOPES_SINCE = 6
"""The version that holds signals back."""


_RULESET = struct.Struct("=QQQ")
"""Rights over files, over ports, scopes."""
_BENEATH = struct.Struct("=Qi")
"""Rights, and the descriptor of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """What may be used, each with all that lies below. Missing ones are left out."""

    read_only: Iterable[str]
    """Read and executed."""
    devices: Iterable[str]
    """Read and written, nothing made."""
    own: Iterable[str]
    """Everything but device nodes."""


@functools.cache
def abi() -> int:
    """The kernel's version of Landlock; 0 where it is absent or switched off."""
    try:
        return syscalls.call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def lacks(version: int) -> str:
    """What a version can't do that a later one can; empty for none."""
    since = ((2, "moves between directories"), (3, "truncation"), (4, "TCP ports"), (5, "device controls"),
             (6, "abstract sockets and signals"))  # fmt: skip
    return ", ".join(name for first, name in since if version < first)


def restrict(paths: Paths) -> None:
    """Hold this process and all it will start to the paths, for good. Needs no_new_privs. Raises OSError."""
    enforce(prepare(paths))


def prepare(paths: Paths) -> int:
    """A descriptor of rules for `enforce`: the paths are opened now, with the rights this process still has. Raises OSError."""
    version = abi()
    if not version:
        raise OSError("this kernel has no Landlock")
    return _make_rules(version, paths)


def enforce(rules: int) -> None:
    """As `restrict`; closes the descriptor. Raises OSError."""
    try:
        syscalls.call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def scope_signals() -> None:
    """Hold back the signals of this process, and of all it will start, from processes outside; nothing else. Raises OSError."""
    if abi() < SCOPES_SINCE:
        raise OSError(f"Landlock holds signals back since version {SCOPES_SINCE}; this kernel has {abi()}")
    rules = syscalls.call("landlock_create_ruleset", _RULESET.pack(0, 0, _SIGNALS), _RULESET.size, 0)
    try:
        syscalls.call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _make_rules(version: int, paths: Paths) -> int:
    handled = _FIRST_RIGHTS
    for first, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEVICE)):
        handled |= right if version >= first else 0
    ports = _BIND_AND_CONNECT_TCP if version >= 4 else 0
    ruleset = _RULESET.pack(handled, ports, _ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = syscalls.call("landlock_create_ruleset", ruleset, size, 0)
    for found, rights in ((paths.read_only, _READ_ONLY), (paths.devices, _DEVICE), (paths.own, _OWN)):
        for path in found:
            _allow(rules, path, rights & handled)
    return rules


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        syscalls.call(
            "landlock_add_rule", rules, _PATH_BENEATH, _BENEATH.pack(rights, parent), 0, step=f"landlock {path}"
        )
    finally:
        os.close(parent)
