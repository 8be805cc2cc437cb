"""Contain a zygote and then a session. Each step is one line; the first that fails aborts the jail.

Covered, each attacked by tests/integration/test_sandbox_isolation.py:

- Network: an empty network namespace, and socket() is rejected. No TCP, no UDP, no abstract sockets of the host or
  other sessions. A profile with egress adds one descriptor, connected to the service's proxy, but no system call,
  address or mount.
- Host files: the root is a tmpfs with read-only /usr (with /bin, /lib, ...), the interpreter's prefix and the declared
  library paths. /etc/shadow, homes, the repository, /proc, /sys and /run do not exist in it. Nothing in it is writable.
- Other sessions: separate pid, mount, network, ipc, uts and cgroup namespaces, a separate process group, tmpfs, and uid
  (root) or user namespace (ordinary user).
- Privileges: an unused uid, empty capability sets, no_new_privs, a seccomp allow list.
- A second layer by Landlock if the kernel has it: no writes outside /session, no TCP, no signals to other sessions.
- Limits: address space, processes, file size, descriptors, CPU time, disk and inodes; memory, swap, process count and
  cores of the whole session by cgroup if one is writable; wall time and output by the interpreter, and wall time also
  by the service.
- End: killing the session's pid 1 kills all its descendants. A zygote is pid 1 too: its exit ends all its sessions. It
  exits with the launcher, and the launcher with the service; both also exit when their control socket closes.

Not covered:

- Kernel bugs behind allowed calls; side channels; sessions compete for CPU and memory bandwidth.
- Without a writable memory cgroup, the memory of a session is bounded only by processes_max x memory_bytes +
  disk_bytes.
- Sessions can read /usr and the interpreter's prefix: keep secrets out of them.
- Forgery inside a session: code can write the session's replies itself. This affects only its own episode. Verdicts
  that must be reliable are computed in another session.
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

NOBODY_UID = 65534
SOCKET_FD = 3
"""Descriptor of a session's socket."""
EGRESS_FD = 4
"""Descriptor of a session's egress port, if its profile has egress."""


_IN_JAIL = landlock.Paths(read_only=["/"], devices=["/dev"], own=[mounts.PRIVATE_DIR])
"""Landlock paths of a root that its mount already makes read-only."""


class ContainmentError(Exception):
    """A step failed: the jail does not exist and no foreign code ran. The text names the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteContext:
    """State of a contained zygote that is needed to create sessions."""

    plan: IsolationPlan
    pid_namespace_fd: int
    proc_fd: int
    """Descriptor of a /proc directory, for id maps and namespace handles, because the jail's root has none. A session's
    code never sees it."""
    namespaces: int
    """Clone flags of the namespaces among the mechanisms."""
    readable: Sequence[str] = ()
    """Paths of the host that a session may read and execute, if it has no separate root."""

    def has(self, mechanism: str) -> bool:
        """Return whether a mechanism is enforced."""
        return mechanism in self.plan.mechanisms


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """Settings of one session to be contained."""

    limits: Limits
    uid: int
    socket_fd: int
    cgroup_fds: Sequence[int] = ()
    """Open files of its cgroups, see `Cgroup.enter`."""
    egress_fd: int = -1
    """The session's egress port; -1 without egress."""
    private_dir: str = mounts.PRIVATE_DIR
    """Private directory. The service creates it if the session has no separate root."""
    reaper_pid: int = 0
    """Pid of the session's reaper; 0 if a pid namespace replaces the reaper."""


def contain_zygote(plan: IsolationPlan, *, read_only: Sequence[str]) -> ZygoteContext:
    """Contain the zygote. It keeps the privileges to create jails and loses access to everything else."""
    proc_fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    pid_namespace_fd = os.open("/proc/thread-self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    readable = (*read_only, os.path.realpath(sys.base_prefix), sys.base_prefix)
    if mechanisms.MOUNT_NAMESPACE in plan.mechanisms:
        _step("root", mounts.build_root, readable)
    if mechanisms.USER_NAMESPACE in plan.mechanisms or os.geteuid() == 0:
        _step("bounding set", privileges.drop_bounding_set)
    _step("no new privileges", privileges.no_new_privileges)
    landlock.abi()  # sessions inherit the cached result
    return ZygoteContext(
        plan=plan,
        pid_namespace_fd=pid_namespace_fd,
        proc_fd=proc_fd,
        namespaces=namespaces.flags_of(plan.mechanisms),
        readable=(*mounts.SYSTEM, *readable),
    )


def contain_session(context: ZygoteContext, spec: SessionSpec) -> None:
    """Contain a session. Its first process calls this before any foreign code. Raises ContainmentError; the caller must
    then exit."""
    inner = NOBODY_UID if context.has(mechanisms.USER_NAMESPACE) else spec.uid
    # kill(0) ignores pid namespaces: in a shared process group a session could kill the zygote
    _step("process group", os.setsid)
    _step("cgroups", _join_cgroups, spec.cgroup_fds)
    if context.has(mechanisms.MOUNT_NAMESPACE):
        _step("namespaces", namespaces.isolate_session, context.namespaces, proc=context.proc_fd, inner=inner)
        room = {"bytes_max": spec.limits.disk_bytes, "inodes_max": spec.limits.inodes_max}
        _step("private directory", mounts.mount_private_dir, **room, uid=inner, gid=inner)
        mounts.mount_terminals()
    confined = context.has(mechanisms.PID_NAMESPACE) or kill_method_for(context.plan, 1).confined
    _step("private directory", process_env.enter, spec.private_dir, kill_confined=confined)
    _step("descriptors", _arrange_descriptors, spec.private_dir, spec.socket_fd, spec.egress_fd)
    rules = _step("landlock", landlock.prepare, _paths(context, spec)) if context.has(mechanisms.LANDLOCK) else -1
    own_count = context.has(mechanisms.USER_NAMESPACE) or context.has(mechanisms.OWN_UID)
    _step("rlimits", rlimits.apply, spec.limits, processes=own_count)
    if context.has(mechanisms.USER_NAMESPACE):
        _step("bounding set", privileges.drop_bounding_set)
    elif context.has(mechanisms.OWN_UID):
        _step("uid", privileges.become, inner, inner)
    if spec.reaper_pid:
        _step("reaper", _exit_with_parent, spec.reaper_pid)
    _step("capabilities", privileges.drop_capabilities)
    _step("no new privileges", privileges.no_new_privileges)
    if context.has(mechanisms.LANDLOCK):
        _step("landlock", landlock.enforce, rules)
    if context.has(mechanisms.SECCOMP):
        _step("seccomp", seccomp.install, context.plan.seccomp_filter)


def kill_method_for(plan: IsolationPlan, uid: int) -> reaper.KillMethod:
    """Return how the session that runs as `uid` is killed if it has no pid namespace. The killer uses the next uid."""
    uids = reaper.Uids(session=uid, killer=uid + 1) if mechanisms.OWN_UID in plan.mechanisms else None
    scoped = mechanisms.LANDLOCK in plan.mechanisms and landlock.abi() >= landlock.SCOPES_SINCE
    return reaper.KillMethod(uids=uids, scoped=scoped)


def _paths(context: ZygoteContext, spec: SessionSpec) -> landlock.Paths:
    if context.has(mechanisms.MOUNT_NAMESPACE):
        return _IN_JAIL
    return landlock.Paths(read_only=context.readable, devices=mounts.DEVICES, own=[spec.private_dir])


def _exit_with_parent(parent: int) -> None:
    privileges.die_with_parent()
    if os.getppid() != parent:
        raise OSError("the reaper has exited")


def _step(name: str, action: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    try:
        return action(*args, **kwargs)
    except (OSError, ValueError) as error:
        raise ContainmentError(f"{name}: {error}") from error


def _join_cgroups(entry_fds: Sequence[int]) -> None:
    for fd in entry_fds:
        os.write(fd, b"0")


def _arrange_descriptors(private_dir: str, socket_fd: int, egress_fd: int) -> None:
    """Set the descriptors: stdin is empty, stdout and stderr are unnamed files in the private directory, the socket is
    3, the egress port, if any, is 4, and no other descriptor is open."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    for target in (1, 2):
        os.dup2(os.open(private_dir, os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o600), target)
    # Move them up first: 3 and 4 may be any descriptors of the zygote, including these two.
    socket_fd = syscalls.duplicate(socket_fd, EGRESS_FD + 1)
    last = SOCKET_FD
    if egress_fd >= 0:
        egress_fd = syscalls.duplicate(egress_fd, EGRESS_FD + 1)
        last = os.dup2(egress_fd, EGRESS_FD, False)
    os.dup2(socket_fd, SOCKET_FD, False)
    syscalls.call("close_range", last + 1, 0xFFFFFFFF, 0)
