"""Rounds whose agents are programs: their configuration, and a witness that follows every program and probes every key.

The programs write a journal (`program`). The witness reads it while the run is killed and paused, and checks what the
run does not report:

- the key of an episode is rejected by every other worker at all times, and by its own after the program has exited;
- after SIGKILL of a worker, its programs and their children exit;
- a sample is one of an episode whose program ran to its end;
- no working directory of a program is left.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
from msgspec.structs import replace

from rollmesh.app.config import TrainConfig
from rollmesh.mesh.config import CountsConfig
from rollmesh.services.rollout.config import StagesConfig
from rollmesh.shared.config.registry import Extension

from .processes import Process, gone_after, listed
from .traps import FOLDER_VARIABLE
from .world import HERE, as_train_config, mesh_config

NUM_WORKERS = 4
NUM_PER_WORKER = 24
NUM_AT_ONCE = 64
UPDATES = 6
THINK_S = 12.0
"""Time of each program between its turns, so that all of them run at once on few cores."""
GONE_S_MAX = 5.0
"""Longest time from the end of a worker to the end of its programs, and from the end of a program to that of its
children."""
REFUSED_S_MAX = 20.0
"""Longest time from the exit of a program until its worker rejects its key. A worker may be paused meanwhile."""
_SWEEP_S = 0.5
_REQUEST_S_MAX = 3.0
_PROBED_NEWEST = 128
"""Number of newest programs whose keys are sent to other workers in a sweep."""
JOURNAL = "journal.jsonl"


def program_config(
    model: Path,
    *,
    num_workers: int = NUM_WORKERS,
    num_per_worker: int = NUM_PER_WORKER,
    think_s: float = THINK_S,
    **run: Any,
) -> TrainConfig:
    """Return the configuration of a round: fake model and trainer, by default up to 96 programs at once over four
    workers."""
    run = {"updates_max": UPDATES, "group_s_max": 240.0, "episode_lease_s": 8.0} | run
    mesh = mesh_config(model, engine="tests.chaos.engine:TrappedEngine", **run)
    command = [sys.executable, "-I", "-S", str(HERE / "program.py")]
    rollout = replace(
        mesh.rollout,
        agent=Extension("program", {"command": command, "env": {"CHAOS_THINK_S": str(think_s)}}),
        stages=StagesConfig(run_max=num_per_worker),
        worker=replace(mesh.rollout.worker, episodes_max=num_per_worker + 8),
    )
    return as_train_config(replace(mesh, rollout=rollout, counts=CountsConfig(inference=2, rollout=num_workers)))


def runs_programs(config: TrainConfig) -> bool:
    return config.rollout.agent.name == "program"


def at_once_min(config: TrainConfig) -> int:
    """Return how many programs must run at once at some time of a round: 64 if the workers allow as many."""
    return NUM_AT_ONCE if config.counts.rollout * config.rollout.stages.run_max >= NUM_AT_ONCE else 1


def with_journal(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the configuration whose programs write the journal of a round in `folder`, and are found by the mark of
    its processes."""
    agent = config.rollout.agent
    env = {**agent.options["env"], "CHAOS_JOURNAL": str(folder / JOURNAL), FOLDER_VARIABLE: str(folder / "traps")}
    made = Extension(agent.name, {**agent.options, "env": env})
    return replace(config, rollout=replace(config.rollout, agent=made))


class JournalLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a program."""

    what: Literal["begun", "failed", "done"]
    episode: str
    attempt: int
    pid: int
    start: int = 0
    worker: int = 0
    """Process id of the worker."""
    url: str = ""
    key: str = ""
    folder: str = ""
    children: list[tuple[int, int]] = []
    """Process id and start of each process that does not exit by itself."""

    @property
    def process(self) -> Process:
        return Process(pid=self.pid, parent=0, start=self.start, command=f"program of {self.episode}")

    @property
    def processes(self) -> list[Process]:
        """The program and its children."""
        children = [Process(pid=pid, parent=0, start=start, command="child") for pid, start in self.children]
        return [self.process, *children]


class ProgramCounts(msgspec.Struct, kw_only=True):
    """What the witness of a round saw."""

    started: int = 0
    finished: int = 0
    at_once_max: int = 0
    killed: int = 0
    """Programs that received SIGKILL in a fault."""
    of_killed_workers: int = 0
    """Programs that ran when their worker received SIGKILL. All of them exited."""
    gone_s_max: float = 0.0
    """Longest time from SIGKILL of a worker until its programs had exited, seconds."""
    refused_dead: int = 0
    """Keys that their own address rejected after the end of their episode."""
    refused_foreign: int = 0
    """Keys that another worker rejected."""
    accepted: int = 0
    """Keys of running programs that their own worker accepted."""


class ProgramsFailed(Exception):
    """A guarantee about programs that the witness found violated."""


class ProgramWitness:
    """Follows the programs of one round."""

    def __init__(self, folder: Path) -> None:
        self.counts = ProgramCounts()
        self._journal = folder / JOURNAL
        self._read_bytes = 0
        self._begun: list[JournalLine] = []
        self._done: set[str] = set()
        self._ended_s: dict[str, float] = {}
        """When the program with a key was first seen to have exited."""
        self._refused: set[str] = set()
        """Keys of ended programs that their own address has rejected, or that nothing listens at."""
        self._probed: set[tuple[str, str]] = set()
        """Keys, and addresses of other workers that rejected them."""
        self._accepted: set[str] = set()

    async def watch(self) -> None:
        """Probe keys until cancelled. Raise ProgramsFailed for a key that opens what it must not."""
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S_MAX)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._sweep(session)
                await asyncio.sleep(_SWEEP_S)

    def running(self) -> list[JournalLine]:
        """Return the programs that run now."""
        self._read()
        return [line for line in self._begun if line.key not in self._ended_s and line.process.alive]

    async def worker_killed(self, pid: int) -> None:
        """Wait until the programs of a killed worker and their children have exited. Raise ProgramsFailed if they do
        not."""
        self._read()
        family = [p for line in self._begun if line.worker == pid for p in line.processes if p.alive]
        gone_s, left = await gone_after(family, GONE_S_MAX)
        if left:
            raise ProgramsFailed(f"{GONE_S_MAX:g} s after SIGKILL of worker {pid} there are still {listed(left)}")
        self.counts.of_killed_workers += len(family)
        self.counts.gone_s_max = round(max(self.counts.gone_s_max, gone_s), 2)

    def check(self, sample_ids: Iterable[str], *, at_once: int) -> None:
        """Check the end of the run. `sample_ids` are those of the final weights; at least `at_once` programs must have
        run at once."""
        self._read()
        counts = self.counts
        counts.started, counts.finished = len(self._begun), len(self._done)
        unseen = sorted({sample.rpartition("-")[0] for sample in sample_ids} - self._done)
        if unseen:
            raise ProgramsFailed(f"samples of episodes whose program did not run to its end: {', '.join(unseen[:5])}")
        if folders := [line.folder for line in self._begun if Path(line.folder).exists()]:
            raise ProgramsFailed(f"{len(folders)} working directories are left: {', '.join(folders[:5])}")
        if left := [one for line in self._begun for one in line.processes if one.alive]:
            raise ProgramsFailed(f"processes are left: {listed(left)}")
        if counts.at_once_max < at_once:
            raise ProgramsFailed(f"at most {counts.at_once_max} programs ran at once, expected {at_once}")
        if not (counts.refused_dead and counts.refused_foreign and counts.accepted):
            raise ProgramsFailed(f"too few keys were probed: {counts}")

    # Keys -------------------------------------------------------------------------------------------------------------

    async def _sweep(self, session: aiohttp.ClientSession) -> None:
        running = self.running()
        self.counts.at_once_max = max(self.counts.at_once_max, len(running))
        now_s = time.monotonic()
        living = {line.key for line in running}
        for line in self._begun:
            if line.key not in living:
                self._ended_s.setdefault(line.key, now_s)
        self._check_children(now_s)
        urls = sorted({line.url for line in running})
        dead = [line for line in self._begun if line.key in self._ended_s and line.key not in self._refused]
        accepted = [line for line in running if line.key not in self._accepted]
        foreign = [
            (line, url)
            for number, line in enumerate(self._begun[-_PROBED_NEWEST:])
            for url in urls[number % max(len(urls), 1) :][:1]
            if url != line.url and (line.key, url) not in self._probed
        ]
        await asyncio.gather(
            *(self._probe_dead(session, line) for line in dead),
            *(self._probe_foreign(session, line, url) for line, url in foreign),
            *(self._probe_own(session, line) for line in accepted),
        )

    async def _probe_dead(self, session: aiohttp.ClientSession, line: JournalLine) -> None:
        status = await _status(session, line.url, line.key)
        if status == 0 and time.monotonic() - self._ended_s[line.key] < REFUSED_S_MAX:
            return  # the worker may be paused
        if status == 200 and time.monotonic() - self._ended_s[line.key] > REFUSED_S_MAX:
            raise ProgramsFailed(f"the key of {line.episode} is accepted {REFUSED_S_MAX:g} s after its program exited")
        if status in (0, 401):
            self._refused.add(line.key)
            self.counts.refused_dead += status == 401
        elif status != 200:
            raise ProgramsFailed(f"the key of {line.episode}, which has ended, gets status {status}")

    async def _probe_foreign(self, session: aiohttp.ClientSession, line: JournalLine, url: str) -> None:
        status = await _status(session, url, line.key)
        if status not in (0, 401):
            raise ProgramsFailed(f"the key of {line.episode} gets status {status} at another worker, {url}")
        if status:
            self._probed.add((line.key, url))
            self.counts.refused_foreign += 1

    async def _probe_own(self, session: aiohttp.ClientSession, line: JournalLine) -> None:
        if await _status(session, line.url, line.key) == 200:  # another status: it ended meanwhile
            self._accepted.add(line.key)
            self.counts.accepted += 1

    def _check_children(self, now_s: float) -> None:
        for line in self._begun:
            ended = now_s - self._ended_s.get(line.key, now_s) > GONE_S_MAX
            if ended and (left := [one for one in line.processes[1:] if one.alive]):
                raise ProgramsFailed(f"{GONE_S_MAX:g} s after the end of {line.episode} there are {listed(left)}")

    def _read(self) -> None:
        if not self._journal.is_file():
            return
        with self._journal.open("rb") as file:
            file.seek(self._read_bytes)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._read_bytes += len(raw)
                line = msgspec.json.decode(raw, type=JournalLine)
                if line.what == "begun":
                    self._begun.append(line)
                elif line.what == "done":
                    self._done.add(line.episode)


async def _status(session: aiohttp.ClientSession, url: str, key: str) -> int:
    """Return the status of a request with this key; 0 if there is no reply."""
    try:
        async with session.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"}) as reply:
            return reply.status
    except (aiohttp.ClientError, TimeoutError, OSError):
        return 0


def signal_programs(programs: Sequence[JournalLine], number: int) -> None:
    """Send a signal to each program itself, and not to its children."""
    for line in programs:
        if line.process.alive:
            with suppress(ProcessLookupError):
                os.kill(line.pid, number)
