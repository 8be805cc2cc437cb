"""Receive commands to the trainer on WatchRun. If a command is missed, later calls return the same state as errors."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

from rollmesh.client import Run
from rollmesh.services.learner.config import LearnerRetryConfig
from rollmesh.services.learner.progress import LearnerProgress
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import MeshError, PermissionDenied, Unauthenticated, Unimplemented
from rollmesh.shared.net.retry import Backoff
from rollmesh.v1 import run_pb2

_log = logging.getLogger(__name__)

_FATAL = (Unauthenticated, PermissionDenied, Unimplemented)
"""Errors that a retry cannot resolve."""


class Commands:
    """Watch the run inside `async with`, and reconnect when the stream breaks."""

    def __init__(
        self, run: Run, config: LearnerRetryConfig, clock: Clock, progress: LearnerProgress | None = None
    ) -> None:
        """Record refused versions in `progress`."""
        self.stop = asyncio.Event()
        """Set once, never cleared: finish the current update, write a checkpoint, exit."""
        self._checkpoint = False
        self._run = run
        self._progress = progress or LearnerProgress(clock)
        self._backoff = Backoff(config, clock)
        self._task: asyncio.Task[None] | None = None

    def take_checkpoint(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        wanted, self._checkpoint = self._checkpoint, False
        return wanted

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch(), name="learner commands")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None, "not entered"
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _watch(self) -> None:
        while True:
            try:
                async for message in self._run.watch():
                    self._backoff.reset()
                    self._execute(message.command)
                    self._note_refused(message.state)
            except _FATAL as err:
                _log.warning("the learner receives no commands: cause=%s", err)
                return
            except MeshError as err:
                _log.debug("WatchRun failed and is retried: cause=%s", err)
            await self._backoff.pause()

    def _execute(self, command: int) -> None:
        if command == run_pb2.TRAINER_COMMAND_STOP:
            self.stop.set()
        elif command == run_pb2.TRAINER_COMMAND_CHECKPOINT:
            self._checkpoint = True

    def _note_refused(self, state: run_pb2.RunState) -> None:
        for policy in state.policies:
            for name, cause in policy.refused.items():
                if name not in self._progress.refused:
                    _log.error("the nodes refused weights of this learner: version=%s cause=%s", name, cause)
                    self._progress.refused[name] = cause
