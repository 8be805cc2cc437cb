"""Run the same attacks without isolation: a plain process of root on this host, bounded from outside, shows that they
succeed there.

The process is bounded by a separate cgroup (memory and processes), by time, and by a pid and a mount namespace, so that
`kill(-1)` reaches no other process and its mounts disappear with it. It has the files, network, uid and capabilities of
the host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollmesh.sandbox_runtime import cgroups
from rollmesh.sandbox_runtime.limits import Limits

from .arena import with_facts
from .attack import Attack, mismatch
from .world import World

TIME_S = 12.0
"""Seconds after which a control is killed."""
STILL_RUNNING = "and runs on"
_SPIN_S = 1.5
"""Seconds for a control that is known to run on."""
_LIMITS = Limits(memory_bytes=448 << 20, disk_bytes=64 << 20, processes_max=64)


def possible() -> bool:
    """Require root, because most mechanisms restrict what root may do."""
    return os.geteuid() == 0 and shutil.which("unshare") is not None


class Controls:
    """Runs controls one after another. Close it at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        hierarchy = cgroups.detect_here()
        self._group = hierarchy.make(f"control-{os.getpid()}") if hierarchy is not None else None

    def close(self) -> None:
        if self._group is not None:
            self._group.remove()

    def play(self, attack: Attack) -> str:
        """Return why the attack did not succeed in a plain process as `free` says; empty if it did."""
        if not attack.free:
            return ""
        with tempfile.TemporaryDirectory(prefix="rollmesh-control-") as folder:
            script = Path(folder) / "attack.py"
            script.write_text(with_facts(attack.source, self._world.facts()))
            time_s = _SPIN_S if attack.free[-1] == STILL_RUNNING else TIME_S
            return mismatch(self._said(script, folder, time_s), attack.free)

    def _said(self, script: Path, folder: str, time_s: float) -> str:
        fds = self._group.enter(_LIMITS) if self._group is not None else []
        try:
            return _run(script, folder, fds, time_s)
        finally:
            for fd in fds:
                os.close(fd)


def _run(script: Path, folder: str, procs_fds: Sequence[int], time_s: float) -> str:
    join = 'for fd in $0; do echo 0 > /proc/self/fd/$fd; done; exec "$@"'
    bounded = ["sh", "-c", join, " ".join(map(str, procs_fds)), "unshare", "--pid", "--mount", "--fork", "--kill-child"]
    with Path(folder, "said").open("w+b") as said:
        process = subprocess.Popen(
            [*bounded, sys.executable, "-I", "-S", str(script)], stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, cwd=folder, pass_fds=procs_fds, start_new_session=True,
        )  # fmt: skip
        ending = ""
        try:
            process.wait(time_s)
        except subprocess.TimeoutExpired:
            ending = STILL_RUNNING + "\n"
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        return said.read(100_000).decode(errors="replace") + ending
