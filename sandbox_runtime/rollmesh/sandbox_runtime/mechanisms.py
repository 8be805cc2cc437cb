"""The isolation mechanisms of a sandbox by name: guarantee, remedy where the host lacks one, and the drivers that use
them.

A driver is a set of mechanisms: `jail` uses all, `landlock` those that need no namespace, and `none` those that cost
nothing. If a required mechanism is missing, the service does not start unless the operator disables it by name. An
optional one is enforced where it is available. The launcher gets the enforced ones as an `IsolationPlan`; `contain`
applies them and fails if one cannot be applied.
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
    "as root give the service CAP_SYS_ADMIN (a container needs it added, and a seccomp profile that allows unshare and"
    " mount); as an ordinary user allow user namespaces"
)
_CGROUP_REMEDY = (
    "run the service as root, or delegate the controller to it (systemd: Delegate=yes, or systemd-run "
    "--user --scope -p Delegate=yes)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """One kernel mechanism that isolates sessions."""

    name: str
    guarantee: str
    """What it prevents, or what is bounded by it."""
    without: str
    """What sessions can do without it."""
    remedy: str
    """How to make it available on a host."""
    core: bool = False
    """Whether other mechanisms depend on it, so that it cannot be disabled."""


MECHANISMS = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism(
            name=USER_NAMESPACE, core=True,
            guarantee="sessions of an ordinary user own nothing outside and are isolated without root",
            without="an ordinary user cannot create any other namespace",
            remedy="sysctl user.max_user_namespaces=10000; where the sysctl exists also "
                   "kernel.unprivileged_userns_clone=1 and"
            " kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        Mechanism(
            name=PID_NAMESPACE, core=True,
            guarantee="a session sees and signals its own processes only, and all of them end with it",
            without="sessions see other processes of the same user, and ending a session needs a search for its "
                    "processes",
            remedy=_NAMESPACES_REMEDY,
        ),
        Mechanism(
            name=MOUNT_NAMESPACE, core=True,
            guarantee="sessions see no files of the host except read-only programs and libraries; /session is bounded "
                      "in bytes and files",
            without="sessions see the files of the host, and what they write is bounded per file only",
            remedy=_NAMESPACES_REMEDY,
        ),
        Mechanism(
            name=NETWORK_NAMESPACE,
            guarantee="no network, not even loopback, and no abstract sockets of other processes",
            without="only seccomp, and Landlock if available, block the network",
            remedy=_NAMESPACES_REMEDY,
        ),
        Mechanism(
            name=IPC_NAMESPACE,
            guarantee="no System V or POSIX message queues, semaphores or shared memory of other processes",
            without="only seccomp blocks the System V objects of the host",
            remedy=_NAMESPACES_REMEDY,
        ),
        Mechanism(
            name=UTS_NAMESPACE,
            guarantee="sessions do not see the host name",
            without="sessions see the host name",
            remedy=_NAMESPACES_REMEDY,
        ),
        Mechanism(
            name=CGROUP_NAMESPACE,
            guarantee="sessions do not see their path in the control groups of the host",
            without="a session with a /proc could read the group names of the host",
            remedy=_NAMESPACES_REMEDY,
        ),
        Mechanism(
            name=OWN_UID, core=True,
            guarantee="if the service runs as root, each session has a separate uid",
            without="sessions would run as root",
            remedy="give the service CAP_SETUID and CAP_SETGID, or start it as an ordinary user",
        ),
        Mechanism(
            name=CAPABILITIES, core=True,
            guarantee="the capability sets are empty and stay empty",
            without="a session keeps the service's privileges",
            remedy="none known: every Linux lets a process drop capabilities",
        ),
        Mechanism(
            name=NO_NEW_PRIVILEGES, core=True,
            guarantee="setuid programs and file capabilities have no effect",
            without="a setuid program could give a session privileges",
            remedy="Linux 3.5 or later",
        ),
        Mechanism(
            name=SECCOMP,
            guarantee="only listed system calls are allowed: no sockets, tracing, mounts, keys, BPF or io_uring",
            without="the code can make every system call",
            remedy="install libseccomp 2.5 or later (Debian, Ubuntu: apt install libseccomp2; Fedora: dnf install "
                   "libseccomp) on a"
            " kernel with CONFIG_SECCOMP_FILTER",
        ),
        Mechanism(
            name=LANDLOCK,
            guarantee="files are readable and executable below the declared paths only and writable below /session "
                      "only; no TCP; no signals to other sessions",
            without="a jail lacks the second layer behind the namespaces; without namespaces nothing else protects "
                    "files",
            remedy="Linux 5.13 or later (6.12 for signals and abstract sockets) with landlock in the lsm= list, and a "
                   "container whose seccomp"
            " profile allows landlock_*",
        ),
        Mechanism(
            name=RLIMITS, core=True,
            guarantee="per process: address space, CPU time, file size, open files, no core files; per session: "
                      "processes",
            without="one process can exhaust the memory, descriptors and processes of the host",
            remedy="raise the service's own hard limits (ulimit -H) above the profiles'",
        ),
        Mechanism(
            name=MEMORY_CGROUP,
            guarantee="the memory of a session, including its files, is bounded",
            without="a session's memory is bounded only by processes_max x memory_bytes + disk_bytes",
            remedy=_CGROUP_REMEDY,
        ),
        Mechanism(
            name=SWAP,
            guarantee="a session uses no swap",
            without="a session may use swap up to its memory limit",
            remedy=_CGROUP_REMEDY + "; version 1: boot with swapaccount=1",
        ),
        Mechanism(
            name=PIDS_CGROUP,
            guarantee="the processes and threads of a session are bounded, whatever their uid",
            without="processes are bounded per uid only",
            remedy=_CGROUP_REMEDY,
        ),
        Mechanism(
            name=CPU_CGROUP,
            guarantee="a session uses at most limits.cpus cores",
            without="a session may keep all cores busy while its calls run",
            remedy=_CGROUP_REMEDY,
        ),
    )
}  # fmt: skip
"""By name, in the order of display."""

NAMESPACES = frozenset(
    {USER_NAMESPACE, PID_NAMESPACE, MOUNT_NAMESPACE, NETWORK_NAMESPACE, IPC_NAMESPACE, UTS_NAMESPACE, CGROUP_NAMESPACE}
)
CGROUPS = frozenset({MEMORY_CGROUP, SWAP, PIDS_CGROUP, CPU_CGROUP})
_ALWAYS = frozenset({OWN_UID, CAPABILITIES, NO_NEW_PRIVILEGES, SECCOMP, RLIMITS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The mechanisms that a driver enforces."""

    required: frozenset[str]
    optional: frozenset[str]
    required_for_user: frozenset[str] = frozenset()
    """Mechanisms that are also required if the service does not run as root."""
    isolates: bool = True
    """Whether it contains hostile code at all."""


DRIVERS = {
    "jail": Driver(
        required=(NAMESPACES - {CGROUP_NAMESPACE}) | _ALWAYS, optional=CGROUPS | {CGROUP_NAMESPACE, LANDLOCK}
    ),
    "landlock": Driver(required=_ALWAYS | {LANDLOCK}, optional=CGROUPS, required_for_user=frozenset({PIDS_CGROUP})),
    "none": Driver(
        required=frozenset({CAPABILITIES, NO_NEW_PRIVILEGES, RLIMITS}), optional=CGROUPS | {OWN_UID}, isolates=False
    ),
}
"""Drivers other than `jail` must be chosen by name. Without a namespace, the sessions of an ordinary user have no
separate count of processes."""
NO_DRIVER = Driver(required=frozenset(), optional=frozenset(), isolates=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationPlan:
    """The mechanisms that a launcher enforces, and the compiled seccomp filter."""

    mechanisms: frozenset[str]
    seccomp_filter: bytes = b""

    def as_message(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"mechanisms": sorted(self.mechanisms), "seccomp_filter": base64.b64encode(self.seccomp_filter).decode()}


def plan_from_message(message: Mapping[str, Any]) -> IsolationPlan:
    """Decode `IsolationPlan.as_message`. Trusts the sender, which is the service."""
    return IsolationPlan(
        mechanisms=frozenset(message["mechanisms"]), seccomp_filter=base64.b64decode(message["seccomp_filter"])
    )
