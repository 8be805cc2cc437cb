"""Namespaces of a zygote and a session, and the fork of a session as pid 1 of a new namespace.

Network isolation is an empty network namespace per live session: not even loopback is up, and abstract Unix sockets of
the host or other sessions are unreachable. The pid namespace also ends sessions: when its pid 1 exits, the kernel kills
every process in it, including detached ones and nested namespaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from rollmesh.sandbox_runtime import mechanisms, syscalls

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

FLAGS = {
    mechanisms.USER_NAMESPACE: CLONE_NEWUSER,
    mechanisms.PID_NAMESPACE: CLONE_NEWPID,
    mechanisms.MOUNT_NAMESPACE: CLONE_NEWNS,
    mechanisms.NETWORK_NAMESPACE: CLONE_NEWNET,
    mechanisms.IPC_NAMESPACE: CLONE_NEWIPC,
    mechanisms.UTS_NAMESPACE: CLONE_NEWUTS,
    mechanisms.CGROUP_NAMESPACE: CLONE_NEWCGROUP,
}
"""Clone flags by mechanism. A session starts in its own pid and network namespace already; see `Networks`."""


def flags_of(names: Iterable[str]) -> int:
    """Return the clone flags of the namespaces among these mechanisms."""
    return sum(FLAGS.get(name, 0) for name in set(names))


def isolate_children(flags: int, *, outer_uid: int, outer_gid: int) -> None:
    """Give this process new namespaces, and its next child a new pid namespace. In a new user namespace it is root."""
    syscalls.unshare(flags)
    if flags & CLONE_NEWUSER:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        write_id_maps(proc, inner=0, outer_uid=outer_uid, outer_gid=outer_gid)
        os.close(proc)
    if flags & CLONE_NEWUTS:
        syscalls.sethostname("sandbox")  # once, because a session's namespace starts as a copy of this one


def fork_as_init(own_pid_namespace: int) -> int:
    """Fork a child that is pid 1 of a new pid namespace. Returns the child's pid in the parent and 0 in the child.

    This uses os.fork and not a raw clone, because the fork handlers of the interpreter and libc must run. A second
    unshare(NEWPID) is rejected while the children's namespace differs from our own, so the parent returns through the
    descriptor of its namespace.
    """
    syscalls.unshare(CLONE_NEWPID)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            _return_to(own_pid_namespace)
    return pid


class Networks:
    """An empty network namespace per slot, entered before the fork of a session and reused by the next session of the
    slot.

    Creating and removing one costs more than all other namespaces together. Reuse leaks nothing: sessions of a slot
    never overlap, sockets end with their processes, and a session has no privilege over the namespace, whose owner is
    the zygote.
    """

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._by_slot: dict[int, int] = {}
        self._current = -1

    def enter(self, slot: int) -> None:
        """Move this process, and so its next fork, into the slot's namespace. Raises OSError."""
        if slot == self._current:
            return
        if (fd := self._by_slot.get(slot)) is not None:
            syscalls.setns(fd, CLONE_NEWNET)
        else:
            syscalls.unshare(CLONE_NEWNET)
            self._by_slot[slot] = os.open("thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        self._current = slot


def _return_to(own_pid_namespace: int) -> None:
    """Return to the own pid namespace. Otherwise every later fork would be in the wrong namespace, so a zygote that
    cannot return must exit with all its sessions."""
    try:
        syscalls.setns(own_pid_namespace, CLONE_NEWPID)
    except OSError as error:
        raise SystemExit(f"cannot return to the zygote's pid namespace: {error}") from error


def isolate_session(flags: int, *, proc: int, inner: int) -> None:
    """Enter the session's own namespaces. In a user namespace become `inner`, which maps to no user outside.

    The session was already forked into its pid and network namespaces. `proc` is a descriptor of a /proc directory,
    through which the id maps are written, because the jail's root has none.
    """
    syscalls.unshare(flags & ~(CLONE_NEWPID | CLONE_NEWNET))
    if flags & CLONE_NEWUSER:
        write_id_maps(proc, inner=inner, outer_uid=0, outer_gid=0)


def write_id_maps(proc: int, *, inner: int, outer_uid: int, outer_gid: int) -> None:
    """Map one uid and gid. An unprivileged process can map only itself and must disable setgroups first."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner} {outer_uid} 1"),
        ("gid_map", f"{inner} {outer_gid} 1"),
    ):
        fd = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
