"""The lifecycle of one process of a mesh: start, restart after a crash, stop or kill.

    start -> exits with 0                      -> `run` returns: its work is done
          -> exits with 2 or 3                 -> `run` raises ConfigError or DiskFull with the error of the process
          -> exits otherwise, or cannot start  -> pause -> start ...   or, too often, ProcessGaveUp with the end of its log

Invariants: when `run` has returned or raised, the process has exited. The kernel kills the process when the thread that
runs this ends. The process leads a separate session, because the supervisor handles a Ctrl-C at the terminal.
Collaborators: `supervisor` (owns the children), `restarts` (decides whether and when to restart), `process_events`,
`child_log`.
"""  # noqa: E501, W505

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Mapping, Sequence

from rollmesh.mesh.child_log import ChildLog
from rollmesh.mesh.process_events import BAD_CONFIG, DISK_FULL, ProcessEvent, ProcessLog, how_ended
from rollmesh.mesh.restarts import ProcessesConfig, Restarts
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import ConfigError, DiskFull, FailedPrecondition, MeshError
from rollmesh.shared.process.process_launch import bound_to_parent

KILLED_S_MAX = 10.0
"""Longest time that the kernel takes to end a killed process, in seconds."""
_LOG_CHECK_S = 5.0
_FINAL: dict[int, type[MeshError]] = {BAD_CONFIG: ConfigError, DISK_FULL: DiskFull}
"""Exit codes of errors that a restart would repeat."""
_log = logging.getLogger(__name__)


class ProcessGaveUp(FailedPrecondition):
    """A process failed too often to be restarted. The message contains the end of its log."""

    reason = "PROCESS_GAVE_UP"


class Child:
    """One process. `run` runs it until it exits, and `stop` stops it cleanly."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        config: ProcessesConfig,
        log: ChildLog,
        events: ProcessLog,
        clock: Clock,
    ) -> None:
        self.name = name
        self._command = bound_to_parent(command)
        self._environment = environment
        self._config = config
        self._log = log
        self._events = events
        self._clock = clock
        self._restarts = Restarts(config, clock)
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def stop(self) -> None:
        """Ask the process to stop cleanly. `run` returns when it has exited, no later than after `stop_s`."""
        self._stopping.set()

    def kill(self) -> None:
        """Kill the process with SIGKILL. It is restarted, as after a crash."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def run(self) -> None:
        """Run the process until it exits cleanly or is stopped. Raises ConfigError, DiskFull or ProcessGaveUp."""
        while not self._stopping.is_set():
            cause = await self._live()
            if not cause or self._stopping.is_set():
                return
            pause_s = self._restarts.next_pause_s()
            if pause_s is None:
                raise self._gave_up(cause)
            self._report("restarting", cause=cause, pause_s=pause_s, restarts=self._restarts.num_recent)
            await self._unless_stopped(self._clock.sleep(pause_s))

    async def _live(self) -> str:
        """Run the process once. Returns the cause of an exit that was not clean. Raises ConfigError, DiskFull."""
        try:
            with self._log.open() as log:
                self._process = process = await asyncio.create_subprocess_exec(
                    *self._command, env=self._environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as err:
            return f"cannot be started: {err}"
        self._report("started", pid=process.pid)
        try:
            code = await self._end_of(process)
        finally:
            await _kill(process)
        error = self._log.last_error()
        cause = how_ended(code) + (f": {error}" if error else "")
        self._report("ended", pid=process.pid, code=code, cause=cause)
        if code in _FINAL and not self._stopping.is_set():
            raise _FINAL[code](error or f"{self.name} {cause}; its log is {self._log.path}")
        return cause if code else ""

    async def _end_of(self, process: asyncio.subprocess.Process) -> int:
        """Wait until the process exits. End it if it is to stop."""
        ended = asyncio.create_task(process.wait(), name=f"process {self.name}")
        try:
            while not ended.done() and not self._stopping.is_set():
                await self._unless_stopped(asyncio.wait([ended], timeout=_LOG_CHECK_S))
                self._log.trim()
            if not ended.done():
                # A stopped process handles SIGTERM when it continues. SIGTERM comes last: send_signal first polls, and
                # a poll that finds the process ended takes its exit code away from asyncio, which then reports 255.
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
                await asyncio.wait([ended], timeout=self._config.stop_s)
            if not ended.done():
                _log.warning("%s did not stop within %g s and is killed", self.name, self._config.stop_s)
                await _kill(process)
            return await ended
        finally:
            ended.cancel()

    async def _unless_stopped(self, work: Awaitable[object]) -> None:
        """Wait for `work`, or until the process is to stop."""
        tasks = [asyncio.ensure_future(work), asyncio.create_task(self._stopping.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _gave_up(self, cause: str) -> ProcessGaveUp:
        self._report("gave_up", cause=cause)
        config = self._config
        return ProcessGaveUp(
            f"{self.name} {cause}: more than restarts_max = {config.restarts_max} failures within window_s = "
            f"{config.window_s:g} s. "
            f"The end of its log, {self._log.path}:\n{self._log.tail()}",
            process=self.name,
        )

    def _report(self, what: str, **fields: object) -> None:
        event = ProcessEvent(time_s=self._events.now_s(), process=self.name, what=what, **fields)  # type: ignore[arg-type]
        _log.log(logging.WARNING if what in ("restarting", "gave_up") else logging.INFO, "%s", event.text())
        self._events.add(event)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process with SIGKILL and wait until it has exited. No effect on a process that has exited."""
    if process.returncode is None:
        process.kill()
        async with asyncio.timeout(KILLED_S_MAX):
            await process.wait()
