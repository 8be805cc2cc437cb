"""Program that probes each isolation mechanism of this host in a separate process, the way a session uses it.

The service executes it fresh as its own user (`python -I -S`) with an `IsolationPlan` on standard input. It writes a
JSON object to standard output: for each mechanism that depends on the kernel alone, why it is missing, or an empty
text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rollmesh.sandbox_runtime import landlock, mechanisms, mounts, namespaces, privileges, rlimits, seccomp, syscalls
from rollmesh.sandbox_runtime.limits import Limits

_BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from rollmesh.sandbox_runtime.probe import main; main()"
_NOBODY = 65534
_AVAILABLE = "available"


def command(python: str) -> list[str]:
    """Return the command line."""
    return [python, "-I", "-S", "-X", "utf8", "-c", _BOOTSTRAP, str(Path(__file__).resolve().parents[2])]


def main() -> None:
    """Run all probes and print the results. Entry point of the executed program."""
    plan = mechanisms.plan_from_message(json.load(sys.stdin))
    probes: dict[str, Callable[[], None]] = {
        mechanisms.USER_NAMESPACE: lambda: _unshare(0),
        mechanisms.PID_NAMESPACE: _pid_namespace,
        mechanisms.MOUNT_NAMESPACE: _mount_namespace,
        mechanisms.OWN_UID: _own_uid,
        mechanisms.CAPABILITIES: _capabilities,
        mechanisms.NO_NEW_PRIVILEGES: privileges.no_new_privileges,
        mechanisms.SECCOMP: lambda: _seccomp(plan.seccomp_filter),
        mechanisms.LANDLOCK: _landlock,
        mechanisms.RLIMITS: lambda: rlimits.apply(Limits()),
    }
    for name, flag in namespaces.FLAGS.items():
        probes.setdefault(name, lambda flag=flag: _unshare(flag))  # type: ignore[misc]
    print(json.dumps({name: _probe(action) for name, action in probes.items()}))


def _probe(action: Callable[[], None]) -> str:
    """Run an action in a child, which it may change irreversibly. Return why it failed, or an empty text. A child
    without output has failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            os.write(writing, (_error_of(action) or _AVAILABLE).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return "" if output == _AVAILABLE else output or f"the probe failed with status {status}"


def _error_of(action: Callable[[], None]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - any error means that the mechanism is missing; it is recorded here
        return f"{type(error).__name__}: {error}"
    return ""


def _unshare(flag: int) -> None:
    """Unshare as a launcher does. An ordinary user creates a user namespace at the same time."""
    user = os.geteuid() != 0
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    syscalls.unshare(flag | (namespaces.CLONE_NEWUSER if user else 0))
    if user:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        namespaces.write_id_maps(proc, inner=0, outer_uid=outer_uid, outer_gid=outer_gid)


def _pid_namespace() -> None:
    _unshare(namespaces.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if os.getpid() == 1 else 1)
    _expect(os.waitpid(pid, 0)[1] == 0, "the child is not process 1")


def _mount_namespace() -> None:
    _unshare(namespaces.CLONE_NEWNS)
    mounts.build_root((os.path.realpath(sys.base_prefix), sys.base_prefix))
    mounts.mount_private_dir(bytes_max=1 << 20, inodes_max=16, uid=0, gid=0)
    _expect(not os.path.exists("/etc/shadow"), "the files of the host are visible")
    try:
        os.close(os.open("/usr/rollmesh-probe", os.O_CREAT | os.O_WRONLY))
    except OSError:
        return
    raise OSError("the root can be written")


def _own_uid() -> None:
    if os.geteuid() == 0:
        privileges.become(_NOBODY, _NOBODY)
        _expect(os.getresuid() == (_NOBODY,) * 3 and not os.getgroups(), "the uid did not change")


def _capabilities() -> None:
    if os.geteuid() == 0:
        privileges.drop_bounding_set()
    privileges.drop_capabilities()
    found = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    _expect(int(found["CapEff"], 16) == int(found["CapPrm"], 16) == 0, "capabilities are left")


def _seccomp(rules: bytes) -> None:
    if not rules:
        raise OSError("no filter could be compiled")
    privileges.no_new_privileges()
    seccomp.install(rules)
    try:
        syscalls.unshare(0)
    except PermissionError:
        return
    raise OSError("the filter has no effect")


def _landlock() -> None:
    privileges.no_new_privileges()
    landlock.restrict(landlock.Paths(read_only=["/usr"], devices=[], own=[]))
    try:
        os.listdir("/")
    except PermissionError:
        return
    raise OSError("the rules have no effect")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise OSError(otherwise)
