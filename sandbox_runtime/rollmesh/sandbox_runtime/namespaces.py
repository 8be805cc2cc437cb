"""Namespaces: which ones a zygote and a session get, and how a session becomes pid 1 of its own.

Network isolation is an empty network namespace for each live session: not even loopback is up, and abstract Unix sockets of the
host or of another session are not reachable. The pid namespace is also the kill switch: when its pid 1 dies the kernel kills
every process in it, setsid'ed ones and nested namespaces too.
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
"""The network namespace that a session begins in is its own already, see `Networks`; its pid namespace, too."""


def flags_of(names: Iterable[str]) -> int:
    """The namespaces among these walls."""
    return sum(FLAGS.get(name, 0) for name in set(names))


def isolate_children(flags: int, *, outer_uid: int, outer_gid: int) -> None:
    """Give this process namespaces of its own, and its next child a new pid namespace; in a new user namespace it is root."""
    syscalls.unshare(flags)
    if flags & CLONE_NEWUSER:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        write_id_maps(proc, inner=0, outer_uid=outer_uid, outer_gid=outer_gid)
        os.close(proc)
    if flags & CLONE_NEWUTS:
        syscalls.sethostname("sandbox")  # once: a session's namespace begins as a copy of this one


def fork_as_init(own_pid_namespace: int) -> int:
    """fork() whose child is pid 1 of a new pid namespace; returns the child's pid here, 0 in the child.

    os.fork and not a raw clone: the interpreter's and libc's own fork handlers must run. A second unshare(NEWPID) is refused
    while the children's namespace differs from our own, so the parent goes back through the descriptor of its own.
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
    """An empty network namespace per place, entered before the fork of a session and used again by the next session of that place.

    Making and clearing away one costs more than all other namespaces together. Nothing is handed on: sessions of a place never
    overlap, sockets end with their processes, and a session has no privilege over the namespace, whose owner is the zygote.
    """

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._by_slot: dict[int, int] = {}
        self._current = -1

    def enter(self, slot: int) -> None:
        """This process, and so what it forks next, is in the place's namespace. Raises OSError."""
        if slot == self._current:
            return
        if (fd := self._by_slot.get(slot)) is not None:
            syscalls.setns(fd, CLONE_NEWNET)
        else:
            syscalls.unshare(CLONE_NEWNET)
            self._by_slot[slot] = os.open("thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        self._current = slot


def _return_to(own_pid_namespace: int) -> None:
    """Without this every later fork would land in the wrong namespace: a zygote that can't must end, with all sessions."""
    try:
        syscalls.setns(own_pid_namespace, CLONE_NEWPID)
    except OSError as error:
        raise SystemExit(f"cannot return to the zygote's pid namespace: {error}") from error


def isolate_session(flags: int, *, proc: int, inner: int) -> None:
    """Enter the session's own namespaces; in a user namespace become `inner` there, which is nobody outside.

    Its pid and network namespaces are there already: the session was forked into them.

    `proc` is a descriptor of a /proc directory: the jail's root has none, and the maps are written through it.
    """
    syscalls.unshare(flags & ~(CLONE_NEWPID | CLONE_NEWNET))
    if flags & CLONE_NEWUSER:
        write_id_maps(proc, inner=inner, outer_uid=0, outer_gid=0)


def write_id_maps(proc: int, *, inner: int, outer_uid: int, outer_gid: int) -> None:
    """Map one uid and gid. An unprivileged writer may map only itself, and must give up setgroups first."""
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
