"""The coordinator's commands to an inference node, and the node's reports.

Each weight command runs in a task of its own: a node that prepares step 6 must still activate step 5. `WeightKeeper` keeps activations
in order and joins what is asked twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.state import NodeState
from rollmesh.services.inference.weights import WeightKeeper
from rollmesh.shared.codec.failure import encode_failure
from rollmesh.shared.codec.trajectory import decode_version, encode_version
from rollmesh.shared.errors import MeshError, ProbeMismatch
from rollmesh.shared.versions import PolicyVersion
from rollmesh.v1 import coordinator_pb2

WeightCommand = coordinator_pb2.WeightCommand
WeightReport = coordinator_pb2.WeightReport

TASKS_MAX = 64
"""Commands carried out at once; the next one waits."""


class InferenceHandler:
    """`NodeHandler` of an inference node. `report` is where outcomes go; set before the first command."""

    def __init__(
        self,
        state: NodeState,
        keeper: WeightKeeper,
        *,
        address: str,
        capacity: int,
        kv: KvPolicy,
        sources: Callable[[], list[str]],
        drain: Callable[[], None],
    ) -> None:
        self.report_weights: Callable[[WeightReport], None] = lambda report: None
        self._state = state
        self._keeper = keeper
        self._address = address
        self._capacity = capacity
        self._kv = kv
        self._sources = sources
        self._drain = drain
        self._tasks: set[asyncio.Task[None]] = set()

    def hello(self) -> coordinator_pb2.NodeHello:
        active = self._state.active
        return coordinator_pb2.NodeHello(
            node_id=self._state.node_id,
            kind=coordinator_pb2.NODE_KIND_INFERENCE,
            address=self._address,
            capacity=self._capacity,
            active=encode_version(active) if active is not None else None,
        )

    def report(self) -> coordinator_pb2.NodeReport:
        load = self._state.engine.load()
        if self._state.gate.failure is not None:
            waiting_for = f"a restart: {self._state.gate.failure}"
        else:
            waiting_for = "" if self._state.active is not None else "weights to activate"
        return coordinator_pb2.NodeReport(
            num_running=load.num_running, num_waiting=load.num_waiting, waiting_for=waiting_for
        )

    async def on_weights(self, command: WeightCommand) -> None:
        while len(self._tasks) >= TASKS_MAX:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(self._carry_out(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def on_cancel(self, command: coordinator_pb2.CancelEpisodes) -> None:
        """Workers cancel their own requests."""

    async def on_drain(self) -> None:
        self._drain()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _carry_out(self, command: WeightCommand) -> None:
        try:
            version = decode_version(command.version)
            phase = await self._obey(command, version)
        except MeshError as err:
            bad = isinstance(self._state.gate.failure, ProbeMismatch)
            phase = WeightReport.PHASE_PROBE_MISMATCH if bad else WeightReport.PHASE_FAILED
            self.report_weights(WeightReport(version=command.version, phase=phase, failure=encode_failure(err)))
        else:
            if phase is not None:
                self.report_weights(WeightReport(version=command.version, phase=phase))

    async def _obey(self, command: WeightCommand, version: PolicyVersion) -> WeightReport.Phase.ValueType | None:
        if command.verb == WeightCommand.VERB_PREPARE:
            await self._keeper.prepare(version, list(command.sources) or self._sources())
            return WeightReport.PHASE_PREPARED
        if command.verb == WeightCommand.VERB_ACTIVATE:
            await self._keeper.activate(version, self._kv)
            return WeightReport.PHASE_ACTIVE
        if command.verb == WeightCommand.VERB_DISCARD:
            await self._keeper.discard(version)
        return None  # a newer coordinator may know more verbs
