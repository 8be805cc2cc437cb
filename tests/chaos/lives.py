"""The lives of one run under the `rollmesh train` command: started, ended by the supervisor's SIGKILL, resumed, ended in good order.

A later life is started as a person would: `rollmesh train RUN`. Nothing here tells the run what is going to happen to it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from rollmesh.cli.config import load_train_config
from rollmesh.mesh.process_events import FILE, read_process_events
from rollmesh.mesh.run_layout import RunLayout, open_place
from rollmesh.mesh.supervisor import CONFIG_FILE
from rollmesh.sandbox_runtime import cgroups
from rollmesh.shared.process_launch import bound_to_parent
from rollmesh.v1 import run_pb2

from .plan import SERVER, SUPERVISOR
from .processes import Process, descendants, gone_after, marked
from .traps import FOLDER_VARIABLE, Traps
from .world import ROOT, run_state

T = TypeVar("T")
POLL_S = 0.05
ALL_GONE_S_MAX = 5.0
"""After SIGKILL of the supervisor."""


class RoundFailed(Exception):
    """A promise that a round found broken; the message says which."""


class Lives:
    """One run in `folder`/run, configured by `folder`/config.yaml."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.traps = Traps(folder / "traps")
        self.num_lives = 0
        self.gone_s: list[float] = []
        """For each SIGKILL of the supervisor: until everything it had started was gone."""
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._groups: set[str] = set()

    async def start(self) -> None:
        """The first life, or the next."""
        first = self.num_lives == 0
        what = [str(self._folder / "config.yaml"), "--out", str(self.run_dir)] if first else [str(self.run_dir)]
        self.num_lives += 1
        with (self._folder / "command.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *bound_to_parent([sys.executable, "-m", "tests.chaos.command", "train", *what]),
                cwd=ROOT, env=environment(self.traps), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """Of the present life; None while it lasts."""
        return None if self._process is None else self._process.returncode

    async def kill_supervisor(self) -> None:
        """SIGKILL. Raises RoundFailed if not everything it had started is gone in time."""
        assert self._process is not None
        family = descendants(self._process.pid)
        self._process.kill()
        gone_s, left = await gone_after(family, ALL_GONE_S_MAX)
        await self._process.wait()
        if left:
            raise RoundFailed(f"{ALL_GONE_S_MAX:g} s after SIGKILL of the supervisor there are still {_listed(left)}")
        self.gone_s.append(gone_s)

    def pid_of(self, victim: str) -> int | None:
        """Process id of a service, of nats-server or of the supervisor; None if it is not there now."""
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
        """The run's state; None if nobody says so now."""
        self._note_groups()
        if not (self.run_dir / CONFIG_FILE).is_file():
            return None
        return await run_state(self._place())

    async def unless_over(self, what: str, ask: Callable[[], Awaitable[T | None]], *, limit_s: float) -> T | None:
        """What `ask` finds; None if this life ends before. Raises RoundFailed at the limit."""
        deadline_s = time.monotonic() + limit_s
        while self.exit_code is None:
            if (found := await ask()) is not None:
                return found
            if time.monotonic() > deadline_s:
                raise RoundFailed(f"not within {limit_s:g} s: {what}")
            await asyncio.sleep(POLL_S)
        return None

    def left_over(self) -> list[str]:
        """Processes and cgroups of this run that are still there."""
        processes = [_listed([one]) for one in marked(f"{FOLDER_VARIABLE}={self.traps.folder}")]
        hierarchy = cgroups.detect_here()
        groups = [path for name in self._groups for path in (hierarchy.find(f"{name}-") if hierarchy else ())]
        return [*processes, *map(str, groups), *map(str, self.run_dir.glob("sandbox-*/groups-*"))]

    async def end(self) -> None:
        """Whatever is still there is killed."""
        if self._process is not None and self._process.returncode is None:
            family = descendants(self._process.pid)
            self._process.kill()
            await self._process.wait()
            await gone_after(family, ALL_GONE_S_MAX)

    def _place(self) -> RunLayout:
        config = load_train_config(self.run_dir / "config.yaml")
        return open_place(config, run_dir=self.run_dir, base_dir=self._folder)

    def _note_groups(self) -> None:
        """Sandboxes name their cgroups in the run folder while they have any."""
        self._groups |= {path.name.removeprefix("groups-") for path in self.run_dir.glob("sandbox-*/groups-*")}


def environment(traps: Traps) -> dict[str, str]:
    """Of every process of the run: finds the tests and the traps, and is known by them."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, FOLDER_VARIABLE: str(traps.folder), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _listed(processes: list[Process]) -> str:
    return ", ".join(f"{one.pid} ({one.command[-100:]})" for one in processes)
