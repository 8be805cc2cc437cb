"""The coordinator's weight commands to an inference node, and the reports of their results.

Each command runs in a separate task, because a node that prepares step 6 must still activate step 5. `WeightKeeper`
keeps activations in order and joins repeated commands. A preparation that ends after a later command has activated its
version is not activated. The order of the commands decides that, not the steps, because a node may move to another run
whose steps are lower.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.state import ServingState
from rollmesh.services.inference.weights import WeightKeeper
from rollmesh.shared.codec.failure import encode_failure
from rollmesh.shared.codec.trajectory import decode_version
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MeshError, ProbeMismatch
from rollmesh.v1 import coordinator_pb2

WeightCommand = coordinator_pb2.WeightCommand
WeightReport = coordinator_pb2.WeightReport

TASKS_MAX = 64
"""Most commands that run at once; the next one waits."""


class WeightCommands:
    """Runs the weight commands of one node."""

    def __init__(
        self,
        state: ServingState,
        keeper: WeightKeeper,
        *,
        kv: KvPolicy,
        sources: Callable[[], list[str]],
        send_report: Callable[[WeightReport], None],
    ) -> None:
        """`sources` returns the addresses of depots, for commands that name none."""
        self._state = state
        self._keeper = keeper
        self._kv = kv
        self._sources = sources
        self._send_report = send_report
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._activated = 0
        """Number of the latest command whose version was activated, or is being activated."""

    async def start(self, command: WeightCommand) -> None:
        """Start the command in a task; wait while `TASKS_MAX` run."""
        while len(self._tasks) >= TASKS_MAX:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(self._carry_out(command, next(self._numbers)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _carry_out(self, command: WeightCommand, number: int) -> None:
        try:
            version = decode_version(command.version)
            phase = await self._execute(command, version, number)
        except MeshError as err:
            bad = isinstance(self._state.gate.failure, ProbeMismatch)
            phase = WeightReport.PHASE_PROBE_MISMATCH if bad else WeightReport.PHASE_FAILED
            self._send_report(WeightReport(version=command.version, phase=phase, failure=encode_failure(err)))
        else:
            if phase is not None:
                self._send_report(WeightReport(version=command.version, phase=phase))

    async def _execute(
        self, command: WeightCommand, version: PolicyVersion, number: int
    ) -> WeightReport.Phase.ValueType | None:
        if command.verb == WeightCommand.VERB_PREPARE:
            await self._keeper.prepare(version, list(command.sources) or self._sources())
            if not command.activate or number < self._activated:
                return WeightReport.PHASE_PREPARED
        elif command.verb != WeightCommand.VERB_ACTIVATE:
            if command.verb == WeightCommand.VERB_DISCARD:
                await self._keeper.discard(version)
            return None  # a newer coordinator may know more verbs
        self._activated = max(self._activated, number)
        await self._keeper.activate(version, self._kv, [decode_version(old) for old in command.retain])
        return WeightReport.PHASE_ACTIVE
