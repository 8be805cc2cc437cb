"""Which walls stand on this host, which of them a configuration raises, and the refusal to start without a required one.

Kernel walls are tried by a program of their own (`sandbox_runtime.probe`), once per process and interpreter; control groups are
looked for here. Blocking: call from a thread.
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
from rollmesh.sandbox_runtime.mechanisms import IsolationPlan, Wall
from rollmesh.services.sandbox import seccomp_policy
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.shared.errors import SandboxFailed

_log = logging.getLogger(__name__)

_PROBE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One wall here and now."""

    wall: Wall
    stands: bool
    detail: str = ""
    """Why not; or of what strength it is."""
    required: bool = False
    raised: bool = False
    """Whether sessions get it: it stands, its driver wants it, and nobody gave it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Somebody other than ourselves to try the walls as; needs root."""

    uid: int
    gid: int


def survey(config: SandboxConfig, user: User | None = None) -> tuple[Standing, ...]:
    """Every wall that matters to whoever runs it, in the order of `mechanisms.WALLS`."""
    found = {**_tried(config.python or os.path.realpath(sys.executable), user), **_groups(config, user)}
    is_root = (user.uid if user else os.geteuid()) == 0
    moot = mechanisms.USER_NAMESPACE if is_root else mechanisms.OWN_UID
    driver = mechanisms.DRIVERS.get(config.engine, mechanisms.NO_DRIVER)
    of_user = frozenset[str]() if is_root else driver.required_of_user
    standings = []
    for name, wall in mechanisms.WALLS.items():
        if name == moot:
            continue
        required, wanted = name in driver.required | of_user, name in driver.required | driver.optional
        stands = not found[name]
        raised = stands and wanted and name not in config.without
        detail = found[name] or _strength(name)
        standings.append(Standing(wall=wall, stands=stands, detail=detail, required=required, raised=raised))
    return tuple(standings)


def drivers(config: SandboxConfig, user: User | None = None) -> dict[str, str]:
    """Why each driver could not run here with an otherwise equal configuration; empty where it could. Nothing counts as given up."""
    reasons = {}
    for name in mechanisms.DRIVERS:
        asked = msgspec.structs.replace(config, engine=name, without=())
        reasons[name] = refusal(asked, survey(asked, user), user)
    return reasons


def plan(config: SandboxConfig) -> IsolationPlan:
    """What to raise here. Logs what the driver lacks and what the operator gave up. Raises SandboxFailed if a required wall does
    not stand and is not given up."""
    standings = survey(config)
    if reason := refusal(config, standings):
        raise SandboxFailed(reason)
    _warn(config, standings)
    for name in config.without:
        _log.warning("sandbox.without gives up %s: %s", name, mechanisms.WALLS[name].without)
    raised = frozenset(standing.wall.name for standing in standings if standing.raised)
    shares_uid = not raised & {mechanisms.PID_NAMESPACE, mechanisms.OWN_UID}
    rules = seccomp_policy.compiled(shares_uid=shares_uid) if mechanisms.SECCOMP in raised else b""
    return IsolationPlan(walls=raised, seccomp_filter=rules)


def refusal(config: SandboxConfig, standings: Iterable[Standing], user: User | None = None) -> str:
    """Why the service can't run here as configured; empty if it can."""
    is_root = (user.uid if user else os.geteuid()) == 0
    if config.engine == "landlock" and not is_root and 0 < landlock.abi() < landlock.SCOPES_SINCE:
        return (
            f"sandbox.engine=landlock as an ordinary user needs Landlock {landlock.SCOPES_SINCE} (Linux 6.12), this kernel has"
            f" {landlock.abi()}: sessions could signal one another and the service. Remedy: run the service as root, or use the jail"
        )
    return next(filter(None, (_lacking(standing, config) for standing in standings)), "")


def _lacking(standing: Standing, config: SandboxConfig) -> str:
    wall = standing.wall
    if not standing.required or standing.raised or wall.name in config.without:
        return ""
    way_out = "" if wall.core else f"; or give it up by name: sandbox.without=[{wall.name}]"
    return (
        f"the wall {wall.name!r} of sandbox.engine={config.engine} does not stand on this host ({standing.detail})."
        f" Without it {wall.without}. Remedy: {wall.remedy}{way_out}"
    )


def _warn(config: SandboxConfig, standings: Iterable[Standing]) -> None:
    """One line per start for a driver that holds less than the jail."""
    absent = "; ".join(f"{each.wall.name}: {each.wall.without}" for each in standings if not each.raised)
    if config.engine not in mechanisms.DRIVERS or config.engine == "jail":
        return
    if not mechanisms.DRIVERS[config.engine].promises:
        _log.warning(
            "sandbox.engine=%s: NOTHING IS ISOLATED, run only code you trust with this host. %s", config.engine, absent
        )
    else:
        _log.warning("sandbox.engine=%s holds less than the jail. %s%s", config.engine, absent, _unreadable(config))


def _unreadable(config: SandboxConfig) -> str:
    """A session of its own uid reads the interpreter where it lies."""
    closed = [path for path in (os.path.realpath(sys.base_prefix), *_libraries(config)) if not _is_open(path)]
    if os.geteuid() != 0 or not closed:
        return ""
    return f"; modules that no profile preloads can't be imported: other users may not read {', '.join(closed)}"


def _libraries(config: SandboxConfig) -> list[str]:
    return sorted({path for profile in config.profiles.values() for path in profile.library_paths})


def _is_open(path: str) -> bool:
    """Whether everybody may enter each directory on the way."""
    try:
        return all(os.stat(step).st_mode & stat.S_IXOTH for step in (path, *map(str, Path(path).parents)))
    except OSError:
        return False


@functools.cache
def _tried(python: str, user: User | None) -> Mapping[str, str]:
    """Why each kernel wall does not stand; empty where it does."""
    reason, rules = "", b""
    try:
        rules = seccomp_policy.compiled()
    except SandboxFailed as error:
        reason = error.message
    question = json.dumps(IsolationPlan(walls=frozenset(), seccomp_filter=rules).as_message())
    try:
        done = subprocess.run(
            probe.command(python), input=question, env=launcher.ENVIRONMENT, cwd="/", capture_output=True, text=True,
            timeout=_PROBE_S, check=True, user=user.uid if user else None, group=user.gid if user else None,
            extra_groups=[] if user else None,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        raise SandboxFailed(
            f"cannot try the walls of this host with {python}: {error} {said[-500:]}".strip()
        ) from error
    found: dict[str, str] = json.loads(done.stdout)
    if reason:
        found[mechanisms.SECCOMP] = reason
    return found


def _groups(config: SandboxConfig, user: User | None) -> Mapping[str, str]:
    if user is not None:
        return dict.fromkeys(mechanisms.CGROUPS, "not looked for as another user")
    if not config.cgroups:
        return dict.fromkeys(mechanisms.CGROUPS, "sandbox.cgroups is off")
    hierarchy = cgroups.detect_here()
    here = hierarchy.bounds() if hierarchy else frozenset()
    return {name: "" if name in here else "no writable control group for it" for name in mechanisms.CGROUPS}


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
