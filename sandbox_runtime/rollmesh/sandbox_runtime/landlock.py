"""Landlock: restrict the access of a process and its children to files, TCP ports and external processes. The process
restricts itself.

It is a second layer behind the mount and network namespaces, and the first without them. It needs no privilege except
no_new_privs. Rights that the kernel's version does not support are omitted; `abi` returns the version and `lacks` the
consequences. A rule applies to a directory and everything mounted below it, but not to a later mount on the directory
itself.
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
"""First version that can block signals."""


_RULESET = struct.Struct("=QQQ")
"""Layout of a rule set: rights over files, rights over ports, scopes."""
_BENEATH = struct.Struct("=Qi")
"""Layout of a path rule: rights, and the descriptor of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Accessible paths, each with everything below it. Missing paths are skipped."""

    read_only: Iterable[str]
    """Readable and executable paths."""
    devices: Iterable[str]
    """Readable and writable paths in which nothing can be created."""
    own: Iterable[str]
    """Paths with all rights except the creation of device nodes."""


@functools.cache
def abi() -> int:
    """Return the kernel's version of Landlock; 0 if it is missing or disabled."""
    try:
        return syscalls.call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def lacks(version: int) -> str:
    """Return what a version lacks compared with the newest known one; empty if nothing."""
    since = ((2, "moves between directories"), (3, "truncation"), (4, "TCP ports"), (5, "device controls"),
             (6, "abstract sockets and signals"))  # fmt: skip
    return ", ".join(name for first, name in since if version < first)


def restrict(paths: Paths) -> None:
    """Restrict this process and all its future children to the paths, permanently. Needs no_new_privs. Raises
    OSError."""
    enforce(prepare(paths))


def prepare(paths: Paths) -> int:
    """Return a descriptor of rules for `enforce`. The paths are opened now, with the current rights of the process.
    Raises OSError."""
    version = abi()
    if not version:
        raise OSError("this kernel has no Landlock")
    return _make_rules(version, paths)


def enforce(rules: int) -> None:
    """Apply prepared rules like `restrict` and close the descriptor. Raises OSError."""
    try:
        syscalls.call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def scope_signals() -> None:
    """Block signals of this process and its future children to processes outside; restrict nothing else. Raises
    OSError."""
    if abi() < SCOPES_SINCE:
        raise OSError(f"Landlock can block signals since version {SCOPES_SINCE}; this kernel has version {abi()}")
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
