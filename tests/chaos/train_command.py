"""One run under the `rollmesh train` command: started, killed with its supervisor, resumed, and finished cleanly.

It is resumed with `rollmesh train RUN`, as a user does. The run is not informed of the faults.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from rollmesh.app.config import load_train_config
from rollmesh.mesh.process_events import FILE, read_process_events
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.mesh.supervisor import CONFIG_FILE
from rollmesh.sandbox_runtime import cgroups
from rollmesh.shared.process.process_launch import bound_to_parent
from rollmesh.v1 import run_pb2

from .plan import SERVER, SUPERVISOR
from .processes import descendants, gone_after, listed, marked
from .traps import FOLDER_VARIABLE, Traps
from .world import ROOT, run_state

T = TypeVar("T")
POLL_S = 0.05
ALL_GONE_S_MAX = 5.0
"""Longest time from SIGKILL of the supervisor until all its processes have exited."""


class RoundFailed(Exception):
    """A guarantee that a round found violated; the message says which."""


class TrainCommand:
    """One run in `folder`/run, with the configuration `folder`/config.yaml."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.traps = Traps(folder / "traps")
        self.num_starts = 0
        self.gone_s: list[float] = []
        """Seconds from each SIGKILL of the supervisor until all its processes had exited."""
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._groups: set[str] = set()

    async def start(self) -> None:
        """Start or resume the run."""
        first = self.num_starts == 0
        what = [str(self._folder / "config.yaml"), "--out", str(self.run_dir)] if first else [str(self.run_dir)]
        self.num_starts += 1
        with (self._folder / "command.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *bound_to_parent([sys.executable, "-m", "tests.chaos.command", "train", *what]),
                cwd=ROOT, env=environment(self.traps), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """The exit code of the current process; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def kill_supervisor(self) -> None:
        """Send SIGKILL. Raises RoundFailed if not all its processes exit in time."""
        assert self._process is not None
        family = descendants(self._process.pid)
        self._process.kill()
        gone_s, left = await gone_after(family, ALL_GONE_S_MAX)
        await self._process.wait()
        if left:
            raise RoundFailed(f"{ALL_GONE_S_MAX:g} s after SIGKILL of the supervisor there are still {listed(left)}")
        self.gone_s.append(gone_s)

    def pid_of(self, victim: str) -> int | None:
        """Return the process id of a service, of nats-server or of the supervisor; None if it does not run."""
        if self._process is None or self._process.returncode is not None:
            return None
        if victim == SUPERVISOR:
            return self._process.pid
        service = "nats" if victim == SERVER else victim
        started = [
            e.pid for e in read_process_events(self.run_dir / FILE) if e.process == service and e.what == "started"
        ]
        family = {one.pid: one for one in descendants(self._process.pid)}
        if not started or started[-1] not in family:
            return None
        if victim != SERVER:
            return started[-1]
        return next((p.pid for p in family.values() if p.parent == started[-1] and "nats-server" in p.command), None)

    async def state(self) -> run_pb2.RunState | None:
        """Return the state of the run; None if the gateway does not respond."""
        self._note_groups()
        if not (self.run_dir / CONFIG_FILE).is_file():
            return None
        return await run_state(self._place())

    async def unless_over(self, what: str, ask: Callable[[], Awaitable[T | None]], *, limit_s: float) -> T | None:
        """Poll `ask` and return its result; None if the process exits first. Raises RoundFailed at the limit."""
        deadline_s = time.monotonic() + limit_s
        while self.exit_code is None:
            if (found := await ask()) is not None:
                return found
            if time.monotonic() > deadline_s:
                raise RoundFailed(f"not within {limit_s:g} s: {what}")
            await asyncio.sleep(POLL_S)
        return None

    def left_over(self) -> list[str]:
        """Return the processes and cgroups of this run that still exist."""
        processes = [listed([one]) for one in marked(f"{FOLDER_VARIABLE}={self.traps.folder}")]
        hierarchy = cgroups.detect_here()
        groups = [path for name in self._groups for path in (hierarchy.find(f"{name}-") if hierarchy else ())]
        return [*processes, *map(str, groups), *map(str, self.run_dir.glob("sandbox-*/groups-*"))]

    async def end(self) -> None:
        """Kill all remaining processes."""
        if self._process is not None and self._process.returncode is None:
            family = descendants(self._process.pid)
            self._process.kill()
            await self._process.wait()
            await gone_after(family, ALL_GONE_S_MAX)

    def _place(self) -> RunLayout:
        config = load_train_config(self.run_dir / "config.yaml")
        return open_layout(config, run_dir=self.run_dir, base_dir=self._folder)

    def _note_groups(self) -> None:
        """Record the cgroups that sandbox services name in the run folder while they exist."""
        self._groups |= {path.name.removeprefix("groups-") for path in self.run_dir.glob("sandbox-*/groups-*")}


def environment(traps: Traps) -> dict[str, str]:
    """Return the environment of every process of the run: it finds the tests and the traps, and it identifies the
    processes."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, FOLDER_VARIABLE: str(traps.folder), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
