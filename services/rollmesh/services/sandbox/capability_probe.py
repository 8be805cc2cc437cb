"""Find the isolation mechanisms that this host offers and those that a configuration enforces, and reject a start
without a required one.

A separate program (`sandbox_runtime.probe`) probes the kernel, once per process and interpreter. Control groups are
detected here. Blocking: call from a thread.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.sandbox_runtime import cgroups, landlock, launcher, mechanisms, probe
from rollmesh.sandbox_runtime.mechanisms import IsolationPlan, Mechanism
from rollmesh.services.sandbox import seccomp_policy
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import SandboxFailed

_log = logging.getLogger(__name__)

_PROBE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismStatus:
    """Status of one isolation mechanism on this host."""

    mechanism: Mechanism
    available: bool
    detail: str = ""
    """Why it is missing; if it is available, its version."""
    required: bool = False
    enforced: bool = False
    """Whether sessions get it: it is available, the driver uses it, and `without` does not name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeUser:
    """A user other than the current one to run the probe as. Needs root."""

    uid: int
    gid: int


def probe_host(config: SandboxConfig, user: ProbeUser | None = None) -> tuple[MechanismStatus, ...]:
    """Return the status of every mechanism that applies to the user, in the order of `mechanisms.MECHANISMS`."""
    found = {**_probe_kernel(config.python or os.path.realpath(sys.executable), user), **_probe_cgroups(config, user)}
    is_root = (user.uid if user else os.geteuid()) == 0
    irrelevant = mechanisms.USER_NAMESPACE if is_root else mechanisms.OWN_UID
    driver = mechanisms.DRIVERS.get(config.engine.name, mechanisms.NO_DRIVER)
    of_user = frozenset[str]() if is_root else driver.required_for_user
    statuses = []
    for name, mechanism in mechanisms.MECHANISMS.items():
        if name == irrelevant:
            continue
        required, wanted = name in driver.required | of_user, name in driver.required | driver.optional
        available = not found[name]
        enforced = available and wanted and name not in config.without
        detail = found[name] or _strength(name)
        statuses.append(
            MechanismStatus(
                mechanism=mechanism, available=available, detail=detail, required=required, enforced=enforced
            )
        )
    return tuple(statuses)


def driver_errors(config: SandboxConfig, user: ProbeUser | None = None) -> dict[str, str]:
    """Return for each driver why it cannot run here with an otherwise equal configuration, or an empty text. `without`
    is ignored."""
    reasons = {}
    for name in mechanisms.DRIVERS:
        asked = msgspec.structs.replace(config, engine=Extension(name), without=())
        reasons[name] = missing_requirement(asked, probe_host(asked, user), user)
    return reasons


def plan(config: SandboxConfig) -> IsolationPlan:
    """Return the mechanisms to enforce. Logs what the driver lacks and what the operator disabled. Raises SandboxFailed
    if a required mechanism is missing and not disabled."""
    statuses = probe_host(config)
    if reason := missing_requirement(config, statuses):
        raise SandboxFailed(reason)
    _warn(config, statuses)
    for name in config.without:
        _log.warning("sandbox.without disables %s: %s", name, mechanisms.MECHANISMS[name].without)
    enforced = frozenset(status.mechanism.name for status in statuses if status.enforced)
    shares_uid = not enforced & {mechanisms.PID_NAMESPACE, mechanisms.OWN_UID}
    rules = seccomp_policy.compiled(shares_uid=shares_uid) if mechanisms.SECCOMP in enforced else b""
    return IsolationPlan(mechanisms=enforced, seccomp_filter=rules)


def missing_requirement(
    config: SandboxConfig, statuses: Iterable[MechanismStatus], user: ProbeUser | None = None
) -> str:
    """Return why the service cannot run here as configured; empty if it can."""
    is_root = (user.uid if user else os.geteuid()) == 0
    if config.engine.name == "landlock" and not is_root and 0 < landlock.abi() < landlock.SCOPES_SINCE:
        return (
            f"sandbox.engine=landlock without root needs Landlock {landlock.SCOPES_SINCE} (Linux 6.12), and this "
            "kernel has"
            f" {landlock.abi()}: sessions could signal one another and the service. Remedy: run the service as root, "
            "or use the jail"
        )
    return next(filter(None, (_missing(status, config) for status in statuses)), "")


def _missing(status: MechanismStatus, config: SandboxConfig) -> str:
    mechanism = status.mechanism
    if not status.required or status.enforced or mechanism.name in config.without:
        return ""
    hint = "" if mechanism.core else f"; or disable it: sandbox.without=[{mechanism.name}]"
    return (
        f"sandbox.engine={config.engine.name} needs the mechanism {mechanism.name!r}, which this host lacks "
        f"({status.detail})."
        f" Without it {mechanism.without}. Remedy: {mechanism.remedy}{hint}"
    )


def _warn(config: SandboxConfig, statuses: Iterable[MechanismStatus]) -> None:
    """Log one line per start for a driver that guarantees less than the jail."""
    absent = "; ".join(f"{each.mechanism.name}: {each.mechanism.without}" for each in statuses if not each.enforced)
    if config.engine.name not in mechanisms.DRIVERS or config.engine.name == "jail":
        return
    if not mechanisms.DRIVERS[config.engine.name].isolates:
        _log.warning(
            "sandbox.engine=%s: NOTHING IS ISOLATED; run only code that you trust with this host. %s",
            config.engine.name,
            absent,
        )
    else:
        _log.warning(
            "sandbox.engine=%s guarantees less than the jail. %s%s", config.engine.name, absent, _unreadable(config)
        )


def _unreadable(config: SandboxConfig) -> str:
    """Return a warning about directories that a session's uid cannot read, because it reads the interpreter in its
    original directory."""
    libraries = sorted({path for profile in config.profiles.values() for path in profile.library_paths})
    closed = [path for path in (os.path.realpath(sys.base_prefix), *libraries) if not _is_open(path)]
    if os.geteuid() != 0 or not closed:
        return ""
    return (
        f"; modules that no profile preloads cannot be imported, because other users may not read {', '.join(closed)}"
    )


def _is_open(path: str) -> bool:
    """Return whether all users may enter each directory of the path."""
    try:
        return all(os.stat(step).st_mode & stat.S_IXOTH for step in (path, *map(str, Path(path).parents)))
    except OSError:
        return False


@functools.cache
def _probe_kernel(python: str, user: ProbeUser | None) -> Mapping[str, str]:
    """Return for each kernel mechanism why it is missing; empty if it is available."""
    reason, rules = "", b""
    try:
        rules = seccomp_policy.compiled()
    except SandboxFailed as error:
        reason = error.message
    request = json.dumps(IsolationPlan(mechanisms=frozenset(), seccomp_filter=rules).as_message())
    try:
        done = subprocess.run(
            probe.command(python), input=request, env=launcher.ENVIRONMENT, cwd="/", capture_output=True, text=True,
            timeout=_PROBE_S, check=True, user=user.uid if user else None, group=user.gid if user else None,
            extra_groups=[] if user else None,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", "") or ""
        raise SandboxFailed(
            f"cannot probe the isolation mechanisms of this host with {python}: {error} {stderr[-500:]}".strip()
        ) from error
    found: dict[str, str] = json.loads(done.stdout)
    if reason:
        found[mechanisms.SECCOMP] = reason
    return found


def _probe_cgroups(config: SandboxConfig, user: ProbeUser | None) -> Mapping[str, str]:
    if user is not None:
        return dict.fromkeys(mechanisms.CGROUPS, "not detected for another user")
    if not config.cgroups:
        return dict.fromkeys(mechanisms.CGROUPS, "sandbox.cgroups is off")
    hierarchy = cgroups.detect_here()
    here = hierarchy.provided() if hierarchy else frozenset()
    return {name: "" if name in here else "this control group is not writable" for name in mechanisms.CGROUPS}


def _strength(name: str) -> str:
    if name == mechanisms.LANDLOCK:
        missing = landlock.lacks(landlock.abi())
        return f"version {landlock.abi()}" + (f", without {missing}" if missing else "")
    if name == mechanisms.SECCOMP:
        return f"libseccomp {seccomp_policy.library_version()}"
    if name in mechanisms.CGROUPS:
        hierarchy = cgroups.detect_here()
        return f"version {hierarchy.version}" if hierarchy else ""
    return ""
