"""The order in which a zygote and then a session are contained. Each step is one line; the first that fails aborts the jail.

Covered, each attacked by tests/integration/test_sandbox_isolation.py:
- Network: an empty network namespace, and socket() refused. No TCP, UDP, host's or other sessions' abstract sockets. A profile
  with egress adds one descriptor, connected to the service's proxy: no system call, address or mount comes with it.
- Host files: the root is a tmpfs with read-only /usr (with /bin, /lib, ...), the interpreter's prefix and the declared library
  paths. /etc/shadow, homes, the repository, /proc, /sys and /run do not exist in it. Nothing in it can be written.
- Other sessions: own pid, mount, network, ipc, uts and cgroup namespaces, own process group, own tmpfs, own uid (root) or user
  namespace (ordinary user).
- Privileges: a uid that is nobody's, empty capability sets, no_new_privs, a seccomp allow list.
- Once more, by Landlock where the kernel has it: files outside /session can't be written, no TCP, no signals to the outside.
- Limits: address space, processes, file size, descriptors, CPU time, disk and inodes; the session's memory, swap, process count
  and cores as a whole by cgroup where one is writable; wall time and output by the interpreter, and wall time again from outside.
- End: killing the session's pid 1 kills all it started. A zygote is pid 1 too: its death ends all its sessions. It dies with
  the launcher, and that with the service; both also end when their control socket closes.

Not covered:
- Kernel bugs behind calls that are allowed; side channels; sessions contend for CPU and memory bandwidth.
- Without a writable memory cgroup a session's memory is bounded only by processes_max x memory_bytes + disk_bytes.
- What /usr and the interpreter's prefix contain can be read: keep secrets out of them.
- Forgery inside a session: code can write the session's replies itself. It fools only its own episode; verdicts that must
  hold are made in another session.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from rollmesh.sandbox_runtime import (
    landlock,
    mechanisms,
    mounts,
    namespaces,
    privileges,
    process_env,
    reaper,
    rlimits,
    seccomp,
    syscalls,
)
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.mechanisms import IsolationPlan

_P = ParamSpec("_P")
_T = TypeVar("_T")

NOBODY = 65534
SOCKET_FD = 3
"""Where a session finds its socket."""
EGRESS_FD = 4
"""Where a session finds its egress port, if its profile has egress."""


_IN_JAIL = landlock.Paths(read_only=["/"], devices=["/dev"], own=[mounts.PRIVATE_DIR])
"""Of a root that is read-only by its mount already."""


class ContainmentError(Exception):
    """A step refused: the jail was not made and nothing ran. Names the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteContext:
    """What a contained zygote holds for making sessions."""

    plan: IsolationPlan
    pid_namespace_fd: int
    proc_fd: int
    """A /proc directory, for id maps and handles of namespaces: the jail's root has none. Never seen by a session's code."""
    namespaces: int
    """Flags of those among the walls."""
    readable: Sequence[str] = ()
    """Where there is no root of its own: what of the host's may be read and executed."""

    def has(self, mechanism: str) -> bool:
        """Whether a wall is to be raised."""
        return mechanism in self.plan.mechanisms


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """One session to be contained."""

    limits: Limits
    uid: int
    socket_fd: int
    cgroup_fds: Sequence[int] = ()
    """Open files of its cgroups, see `Group.entry_fds`."""
    egress_fd: int = -1
    """The session's egress port; -1 for none."""
    private_dir: str = mounts.PRIVATE_DIR
    """Made by the service where there is no root of its own to make it in."""
    reaper_pid: int = 0
    """The pid of the session's warden; 0 where a pid namespace makes one needless."""


def contain_zygote(plan: IsolationPlan, *, read_only: Sequence[str]) -> ZygoteContext:
    """Lock up the zygote itself: it keeps the privileges to make jails and loses sight of everything else."""
    proc_fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    pid_namespace_fd = os.open("/proc/thread-self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    readable = (*read_only, os.path.realpath(sys.base_prefix), sys.base_prefix)
    if mechanisms.MOUNT_NAMESPACE in plan.mechanisms:
        _step("root", mounts.build_root, readable)
    if mechanisms.USER_NAMESPACE in plan.mechanisms or os.geteuid() == 0:
        _step("bounding set", privileges.drop_bounding_set)
    _step("no new privileges", privileges.no_new_privileges)
    landlock.abi()  # sessions inherit the answer
    return ZygoteContext(
        plan=plan,
        pid_namespace_fd=pid_namespace_fd,
        proc_fd=proc_fd,
        namespaces=namespaces.flags_of(plan.mechanisms),
        readable=(*mounts.SYSTEM, *readable),
    )


def contain_session(context: ZygoteContext, spec: SessionSpec) -> None:
    """Run by a session's first process before any foreign code. Raises ContainmentError; the caller must then exit."""
    inner = NOBODY if context.has(mechanisms.USER_NAMESPACE) else spec.uid
    # kill(0) knows no pid namespace: a group shared with the zygote is one to kill it by
    _step("process group", os.setsid)
    _step("cgroups", _join_cgroups, spec.cgroup_fds)
    if context.has(mechanisms.MOUNT_NAMESPACE):
        _enter_namespaces(context, spec.limits, inner)
    _step("private directory", process_env.enter, spec.private_dir, kill_confined=_kill_is_confined(context))
    _step("descriptors", _arrange_descriptors, spec.private_dir, spec.socket_fd, spec.egress_fd)
    rules = _step("landlock", landlock.prepare, _paths(context, spec)) if context.has(mechanisms.LANDLOCK) else -1
    own_count = context.has(mechanisms.USER_NAMESPACE) or context.has(mechanisms.OWN_UID)
    _step("rlimits", rlimits.apply, spec.limits, processes=own_count)
    if context.has(mechanisms.USER_NAMESPACE):
        _step("bounding set", privileges.drop_bounding_set)
    elif context.has(mechanisms.OWN_UID):
        _step("uid", privileges.become, inner, inner)
    if spec.reaper_pid:
        _step("warden", _exit_with_parent, spec.reaper_pid)
    _step("capabilities", privileges.drop_capabilities)
    _step("no new privileges", privileges.no_new_privileges)
    if context.has(mechanisms.LANDLOCK):
        _step("landlock", landlock.enforce, rules)
    if context.has(mechanisms.SECCOMP):
        _step("seccomp", seccomp.install, context.plan.seccomp_filter)


def _enter_namespaces(context: ZygoteContext, limits: Limits, inner: int) -> None:
    _step("namespaces", namespaces.isolate_session, context.namespaces, proc=context.proc_fd, inner=inner)
    room = {"bytes_max": limits.disk_bytes, "inodes_max": limits.inodes_max}
    _step("private directory", mounts.mount_private_dir, **room, uid=inner, gid=inner)
    mounts.mount_terminals()


def kill_method_for(plan: IsolationPlan, uid: int) -> reaper.KillMethod:
    """How the session that runs as `uid` is killed where it has no pid namespace. Its killer has the next uid."""
    uids = reaper.Uids(session=uid, killer=uid + 1) if mechanisms.OWN_UID in plan.mechanisms else None
    scoped = mechanisms.LANDLOCK in plan.mechanisms and landlock.abi() >= landlock.SCOPES_SINCE
    return reaper.KillMethod(uids=uids, scoped=scoped)


def _kill_is_confined(context: ZygoteContext) -> bool:
    return context.has(mechanisms.PID_NAMESPACE) or kill_method_for(context.plan, 1).confined


def _paths(context: ZygoteContext, spec: SessionSpec) -> landlock.Paths:
    if context.has(mechanisms.MOUNT_NAMESPACE):
        return _IN_JAIL
    return landlock.Paths(read_only=context.readable, devices=mounts.DEVICES, own=[spec.private_dir])


def _exit_with_parent(parent: int) -> None:
    privileges.die_with_parent()
    if os.getppid() != parent:
        raise OSError("it ended")


def _step(name: str, action: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    try:
        return action(*args, **kwargs)
    except (OSError, ValueError) as error:
        raise ContainmentError(f"{name}: {error}") from error


def _join_cgroups(entry_fds: Sequence[int]) -> None:
    for fd in entry_fds:
        os.write(fd, b"0")


def _arrange_descriptors(private_dir: str, socket_fd: int, egress_fd: int) -> None:
    """stdin reads nothing, stdout and stderr are nameless files in the private directory, the socket is 3, the egress port 4 where
    there is one, no other is open."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    for target in (1, 2):
        os.dup2(os.open(private_dir, os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o600), target)
    # Out of the way first: 3 and 4 may be any descriptors of the zygote, each of these two included.
    socket_fd = syscalls.duplicate(socket_fd, EGRESS_FD + 1)
    last = SOCKET_FD
    if egress_fd >= 0:
        egress_fd = syscalls.duplicate(egress_fd, EGRESS_FD + 1)
        last = os.dup2(egress_fd, EGRESS_FD, False)
    os.dup2(socket_fd, SOCKET_FD, False)
    syscalls.call("close_range", last + 1, 0xFFFFFFFF, 0)
