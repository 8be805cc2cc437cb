"""The program that a service executes to get a zygote: it creates namespaces, forks the zygote as pid 1, and waits for
it.

It is executed fresh (`python -I -S`) and never forked from the service, so that no thread, lock, descriptor or secret
is inherited. The launcher stays on the host's side, because a process cannot enter a pid namespace itself. It exits
with the service, and the zygote with it. Without a pid namespace it outlives the zygote until the last reaper has
exited.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.sandbox_runtime import mechanisms, mounts, namespaces, privileges, reaper
from rollmesh.sandbox_runtime.mechanisms import IsolationPlan, plan_from_message
from rollmesh.sandbox_runtime.zygote import ZygoteProfile, run_zygote

_BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from rollmesh.sandbox_runtime.launcher import main; main()"
ENVIRONMENT = {
    "HOME": mounts.PRIVATE_DIR,
    "TMPDIR": mounts.PRIVATE_DIR,
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""The complete environment of zygotes and sessions; a session with another private directory changes two variables."""
AT_START = {"LD_BIND_NOW": "1"}
"""Additional environment of the launcher: shared libraries are linked at once, and not again by every session on first
use."""


def command(python: str, control_fd: int, profile: Mapping[str, Any], plan: IsolationPlan) -> list[str]:
    """Return the command line. `control_fd` must be passed on and `ENVIRONMENT` used as the environment. `profile`
    contains the fields of `ZygoteProfile`."""
    root = str(Path(__file__).resolve().parents[2])
    setup = json.dumps(
        {
            "control_fd": control_fd,
            "parent": os.getpid(),
            "profile": dict(profile),
            "plan": plan.as_message(),
        }
    )
    return [python, "-I", "-S", "-X", "utf8", "-c", _BOOTSTRAP, root, setup]


def main() -> None:
    """Run the launcher. Entry point of the executed program."""
    setup = json.loads(sys.argv[2])
    privileges.die_with_parent()
    _reset_signals()
    if os.getppid() != setup["parent"]:
        raise SystemExit("the service exited before its launcher started")
    del sys.argv[1:]
    for name in AT_START:
        os.environ.pop(name, None)
    control = socket.socket(fileno=setup["control_fd"])
    plan = plan_from_message(setup["plan"])
    if flags := namespaces.flags_of(plan.mechanisms):
        namespaces.isolate_children(flags, outer_uid=os.geteuid(), outer_gid=os.getegid())
    if mechanisms.PID_NAMESPACE not in plan.mechanisms:
        reaper.adopt_orphans()
    pid = os.fork()
    if pid == 0:
        run_zygote(control, ZygoteProfile(**setup["profile"]), plan)
        os._exit(0)
    control.close()
    os._exit(abs(os.waitstatus_to_exitcode(_wait_for_all(pid))))


def _reset_signals() -> None:
    """Reset signals. A service started by nohup or in the background of a script ignores some signals; shells in
    sessions would inherit that and could not change it."""
    for number in (
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGCHLD,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    ):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _wait_for_all(zygote: int) -> int:
    """Wait for the zygote and all remaining processes and return the zygote's wait status. No slot may be reused while
    a reaper still clears it."""
    status = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, found = os.waitpid(-1, 0)
            status = found if ended == zygote else status
    return status
