"""The walls of a sandbox by name: what each holds back, what to do where it does not stand, and which of them are raised.

A driver is a set of walls: `jail` raises all, `landlock` those that need no namespace, `none` what no process should lack. A required wall that does not
stand keeps the service from starting, unless the operator gives it up by name; an optional one is raised where it stands. What is
raised travels to the launcher as a `IsolationPlan` and is made by `contain`, which fails if it can't be.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

USER_NAMESPACE = "user namespace"
PID_NAMESPACE = "pid namespace"
MOUNT_NAMESPACE = "mount namespace"
NETWORK_NAMESPACE = "network namespace"
IPC_NAMESPACE = "ipc namespace"
UTS_NAMESPACE = "uts namespace"
CGROUP_NAMESPACE = "cgroup namespace"
OWN_UID = "own uid"
CAPABILITIES = "capabilities"
NO_NEW_PRIVILEGES = "no new privileges"
SECCOMP = "seccomp"
LANDLOCK = "landlock"
RLIMITS = "rlimits"
MEMORY_CGROUP = "memory cgroup"
SWAP = "swap limit"
PIDS_CGROUP = "pids cgroup"
CPU_CGROUP = "cpu cgroup"

_NAMESPACES_REMEDY = (
    "as root give the service CAP_SYS_ADMIN (a container needs it added, and a seccomp profile that lets unshare and mount"
    " through); as an ordinary user allow user namespaces"
)
_CGROUP_REMEDY = "run the service as root, or delegate the controller to it (systemd: Delegate=yes, or systemd-run --user --scope -p Delegate=yes)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """One kernel mechanism."""

    name: str
    guarantee: str
    """What it holds back."""
    without: str
    """What falls away without it."""
    remedy: str
    """How to make it stand."""
    core: bool = False
    """Others rest on it: it can't be given up."""


WALLS = {
    wall.name: wall
    for wall in (
        Wall(
            name=USER_NAMESPACE, core=True,
            guarantee="an ordinary user's sessions own nothing outside, and may be locked up without root",
            without="an ordinary user can make no other namespace",
            remedy="sysctl user.max_user_namespaces=10000; where the sysctl exists also kernel.unprivileged_userns_clone=1 and"
            " kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        Wall(
            name=PID_NAMESPACE, core=True,
            guarantee="a session sees and signals its own processes only, and all of them end with it",
            without="other processes of the same user can be seen, and a session's end is a search for its processes",
            remedy=_NAMESPACES_REMEDY,
        ),
        Wall(
            name=MOUNT_NAMESPACE, core=True,
            guarantee="the host's files are absent but for read-only programs and libraries; /session is bounded in bytes and files",
            without="the host's files are in sight, and what a session writes is bounded per file only",
            remedy=_NAMESPACES_REMEDY,
        ),
        Wall(
            name=NETWORK_NAMESPACE,
            guarantee="no network, not even loopback, and no abstract sockets of others",
            without="only seccomp, and Landlock where it stands, keep a session from the network",
            remedy=_NAMESPACES_REMEDY,
        ),
        Wall(
            name=IPC_NAMESPACE,
            guarantee="no System V or POSIX message queues, semaphores and shared memory of others",
            without="only seccomp keeps a session from the host's System V objects",
            remedy=_NAMESPACES_REMEDY,
        ),
        Wall(
            name=UTS_NAMESPACE,
            guarantee="the host's name is unknown inside",
            without="a session learns the host's name",
            remedy=_NAMESPACES_REMEDY,
        ),
        Wall(
            name=CGROUP_NAMESPACE,
            guarantee="the place of a session in the host's groups is unknown inside",
            without="a session could learn the host's group names, were there a /proc in it",
            remedy=_NAMESPACES_REMEDY,
        ),
        Wall(
            name=OWN_UID, core=True,
            guarantee="started by root, each session runs under a uid that is nobody else's",
            without="sessions would run as root",
            remedy="give the service CAP_SETUID and CAP_SETGID, or start it as an ordinary user",
        ),
        Wall(
            name=CAPABILITIES, core=True,
            guarantee="empty capability sets, for good",
            without="a session keeps the service's privileges",
            remedy="none is known to be needed: every Linux lets a process give capabilities up",
        ),
        Wall(
            name=NO_NEW_PRIVILEGES, core=True,
            guarantee="setuid programs and file capabilities have no effect",
            without="a setuid program could give a session privileges",
            remedy="Linux 3.5 or later",
        ),
        Wall(
            name=SECCOMP,
            guarantee="of the kernel's calls only a list of harmless ones exists: no sockets, tracing, mounts, keys, BPF, io_uring",
            without="the kernel's whole surface lies open to the code",
            remedy="install libseccomp 2.5 or later (Debian, Ubuntu: apt install libseccomp2; Fedora: dnf install libseccomp) on a"
            " kernel with CONFIG_SECCOMP_FILTER",
        ),
        Wall(
            name=LANDLOCK,
            guarantee="files are read and executed below the declared paths and written below /session only; no TCP; no signals out",
            without="in a jail a second wall behind the namespaces is missing; without namespaces it is the one that guards files",
            remedy="Linux 5.13 or later (6.12 for signals and abstract sockets) with landlock in its lsm= list, and a container whose seccomp"
            " profile lets landlock_* through",
        ),
        Wall(
            name=RLIMITS, core=True,
            guarantee="per process: address space, CPU time, file size, open files, no core files; per session: processes",
            without="one process can take the host's memory, descriptors and processes",
            remedy="raise the service's own hard limits (ulimit -H) above the profiles'",
        ),
        Wall(
            name=MEMORY_CGROUP,
            guarantee="the memory of a session, its files included, is bounded as a whole",
            without="a session's memory is bounded only by processes_max x memory_bytes + disk_bytes",
            remedy=_CGROUP_REMEDY,
        ),
        Wall(
            name=SWAP,
            guarantee="a session takes no swap",
            without="on a host with swap a session may fill it up to its memory limit",
            remedy=_CGROUP_REMEDY + "; version 1: boot with swapaccount=1",
        ),
        Wall(
            name=PIDS_CGROUP,
            guarantee="the processes and threads of a session are bounded as a whole, whatever their uid",
            without="processes are bounded by uid only",
            remedy=_CGROUP_REMEDY,
        ),
        Wall(
            name=CPU_CGROUP,
            guarantee="a session uses at most limits.cpus cores",
            without="a session may keep all cores busy for as long as its calls last",
            remedy=_CGROUP_REMEDY,
        ),
    )
}  # fmt: skip
"""In the order in which they are shown."""

NAMESPACES = frozenset(
    {USER_NAMESPACE, PID_NAMESPACE, MOUNT_NAMESPACE, NETWORK_NAMESPACE, IPC_NAMESPACE, UTS_NAMESPACE, CGROUP_NAMESPACE}
)
CGROUPS = frozenset({MEMORY_CGROUP, SWAP, PIDS_CGROUP, CPU_CGROUP})
_ALWAYS = frozenset({OWN_UID, CAPABILITIES, NO_NEW_PRIVILEGES, SECCOMP, RLIMITS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Which walls a way to contain sessions raises."""

    required: frozenset[str]
    optional: frozenset[str]
    required_of_user: frozenset[str] = frozenset()
    """Besides, where an ordinary user runs the service."""
    promises: bool = True
    """Whether it keeps hostile code in at all."""


DRIVERS = {
    "jail": Driver(
        required=(NAMESPACES - {CGROUP_NAMESPACE}) | _ALWAYS, optional=CGROUPS | {CGROUP_NAMESPACE, LANDLOCK}
    ),
    "landlock": Driver(required=_ALWAYS | {LANDLOCK}, optional=CGROUPS, required_of_user=frozenset({PIDS_CGROUP})),
    "none": Driver(
        required=frozenset({CAPABILITIES, NO_NEW_PRIVILEGES, RLIMITS}), optional=CGROUPS | {OWN_UID}, promises=False
    ),
}
"""Those other than `jail` are chosen by name only. An ordinary user's sessions have no count of processes of their own without a namespace."""
NO_DRIVER = Driver(required=frozenset(), optional=frozenset(), promises=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationPlan:
    """What a launcher is to build: the walls by name, and what they need from outside."""

    walls: frozenset[str]
    seccomp_filter: bytes = b""

    def as_message(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"walls": sorted(self.walls), "seccomp_filter": base64.b64encode(self.seccomp_filter).decode()}


def blueprint_from_message(message: Mapping[str, Any]) -> IsolationPlan:
    """The inverse of `IsolationPlan.as_message`; trusts its sender, the service."""
    return IsolationPlan(walls=frozenset(message["walls"]), seccomp_filter=base64.b64decode(message["seccomp_filter"]))
