"""The membership of a node: the client of `CoordinatorService.Join` that every kind of node uses.

One stream carries the hello, then reports to the coordinator and commands to the node. If the coordinator is
unavailable, the node continues its work and joins again with back-off. The last report announces a clean leave. Reports
on a lost stream are not repeated: the next hello contains the active weights, and the coordinator repeats commands
without a response. So handlers must be idempotent.

    coordinator --commands--> inbox (bounded) --> handler task --weight reports--> outbox --> coordinator
                --fleet-----> Fleet (snapshot)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs leave it out

from rollmesh.shared.clock import Clock, SystemClock, clock_warning
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.domain.protocol import PROTOCOL, UNREPORTED, ProtocolVersion, check_protocol
from rollmesh.shared.errors import (
    InvalidInput,
    MeshError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.shared.net.retry import Backoff
from rollmesh.shared.process.process_info import this_process
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

_log = logging.getLogger(__name__)

DRAIN_CALL_S_MAX = 2.0
"""Deadline of the call by which a node reports that it drains on its own, in seconds."""
_FATAL = (InvalidInput, Unauthenticated, PermissionDenied, Unimplemented)
"""Errors that the same hello would get again."""


class MembershipConfig(Settings):
    """Timeouts and limits of a membership."""

    welcome_s: PositiveFloat = 10.0
    """Longest wait for the coordinator's welcome before the stream is dropped, in seconds."""
    backoff_s: PositiveFloat = 0.1
    """First pause before joining again, in seconds; doubles with every consecutive failure up to `backoff_s_max`."""
    backoff_s_max: PositiveFloat = 5.0
    """Longest pause, in seconds. It bounds how late a restarted coordinator sees this node again."""
    commands_max: PositiveInt = 256
    """Maximum number of commands that wait for the handler. More mean a stuck handler, so the stream is dropped with
    the commands."""
    leave_s: PositiveFloat = 5.0
    """Longest wait for the last report when the node leaves, in seconds."""


class NodeHandler(Protocol):
    """Handles the coordinator's messages for a node. `PassiveHandler` is a base class that does nothing."""

    def hello(self) -> coordinator_pb2.NodeHello:
        """Return the hello of the node. It is called at every join, so that it contains the active weights."""
        ...

    def report(self) -> coordinator_pb2.NodeReport:
        """Return the load and the reason of a wait. Weight reports are added to it."""
        ...

    async def on_weights(self, command: coordinator_pb2.WeightCommand) -> None:
        """Execute a weight command, or start to. Respond with `Membership.report_weights`. Commands come in order; the
        handler is idempotent."""
        ...

    async def on_cancel(self, command: coordinator_pb2.CancelEpisodes) -> None: ...

    async def on_drain(self) -> None: ...


class PassiveHandler:
    """A node that ignores commands."""

    def __init__(self, hello: coordinator_pb2.NodeHello) -> None:
        self._hello = hello

    def hello(self) -> coordinator_pb2.NodeHello:
        return self._hello

    def report(self) -> coordinator_pb2.NodeReport:
        return coordinator_pb2.NodeReport()

    async def on_weights(self, command: coordinator_pb2.WeightCommand) -> None: ...

    async def on_cancel(self, command: coordinator_pb2.CancelEpisodes) -> None: ...

    async def on_drain(self) -> None: ...


class Membership:
    """Joined from `start` to `stop`, or inside `async with`."""

    def __init__(
        self,
        address: str,
        *,
        access: Access,
        handler: NodeHandler,
        clock: Clock | None = None,
        config: MembershipConfig | None = None,
        fleet: KnownFleet | None = None,
    ) -> None:
        self.fleet = fleet or KnownFleet()
        self.coordinator_id = ""
        """Id of the coordinator's process; changes when it restarts. Empty before the first welcome."""
        self.waiting_for = f"the coordinator at {address}"
        """Why this node is not joined; empty while it is."""
        self._address = address
        self._access = access
        self._handler = handler
        self._clock = clock or SystemClock()
        self._config = config or MembershipConfig()
        self._weights: list[coordinator_pb2.WeightReport] = []
        self._urgent = asyncio.Event()
        self._joined = asyncio.Event()
        self._refusal: MeshError | None = None
        self._rejected = asyncio.Event()
        """Set with `_refusal`."""
        self._leaving = False
        self._draining = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def start(self) -> None:
        """Start to join, in the background."""
        assert self._task is None, "already started"
        self._task = asyncio.create_task(self._run(), name=f"membership {self._handler.hello().node_id}")
        self._task.add_done_callback(_log_crash)

    async def stop(self) -> None:
        """Send the last report and leave. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        self._leaving = True
        self._urgent.set()
        if self.joined:
            await asyncio.wait([task], timeout=self._config.leave_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    @property
    def joined(self) -> bool:
        return self._joined.is_set()

    async def rejected(self) -> NoReturn:
        """Wait until the coordinator rejects this node permanently, and raise that error. Otherwise wait until
        cancelled."""
        await self._rejected.wait()
        assert self._refusal is not None
        raise self._refusal

    @property
    def draining(self) -> bool:
        """Whether the node has the command to drain."""
        return self._draining

    async def drain(self) -> None:
        """Drain this node: ask the coordinator, and continue without a response. Idempotent."""
        try:
            async with open_channel(self._address, access=self._access) as channel:
                stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
                request = coordinator_pb2.DrainRequest(node_id=self._handler.hello().node_id)
                with typed_errors():
                    await stub.Drain(request, timeout=DRAIN_CALL_S_MAX)
        except MeshError as err:
            _log.warning("draining without the coordinator: %s", err)
        await self._on_drain()

    async def wait_joined(self, timeout_s: float = 30.0) -> None:
        """Return after the welcome. Raises the coordinator's rejection (wrong token, wrong hello), or `Unavailable`."""
        waiting = asyncio.create_task(self._joined.wait())
        watched: list[asyncio.Task[Any]] = [waiting] if self._task is None else [waiting, self._task]
        try:
            await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._refusal is not None:
            raise self._refusal
        if not self.joined:
            raise Unavailable(f"not joined after {timeout_s} s: {self.waiting_for}; is the coordinator running?")

    def report_weights(self, report: coordinator_pb2.WeightReport) -> None:
        """Send the result of a weight command immediately."""
        self._weights.append(report)
        self._urgent.set()

    # One stream after another -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        # The node's name is the seed, so that nodes that lost the same coordinator do not reconnect in step.
        backoff = Backoff(self._config, self._clock, random.Random(self._handler.hello().node_id))
        while not self._leaving:
            try:
                await self._serve_stream()
            except _FATAL as err:
                self._lost(f"the coordinator refuses this node: {err}")
                self._refusal = err
                self._rejected.set()
                _log.error("%s", self.waiting_for)
                return
            except (MeshError, TimeoutError) as err:
                if self.joined:
                    backoff.reset()
                self._lost(f"the coordinator at {self._address}: {err or 'no welcome in time'}")
            if not self._leaving:
                await backoff.pause()

    def _lost(self, cause: str) -> None:
        if self.joined and not self._leaving:
            _log.warning("lost %s", cause)
        self._joined.clear()
        self.waiting_for = cause

    async def _serve_stream(self) -> None:
        """Run one stream from the hello to its end. Raises `MeshError` or TimeoutError when it is lost."""
        async with open_channel(self._address, access=self._access) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            call = stub.Join()
            with typed_errors():
                await _send(call, coordinator_pb2.JoinRequest(hello=self._hello()))
                async with asyncio.timeout(self._config.welcome_s):
                    heartbeat_s = await self._welcome(call)
            self._joined.set()
            self.waiting_for = ""
            await self._talk(call, heartbeat_s)

    def _hello(self) -> coordinator_pb2.NodeHello:
        """A restarted coordinator has no earlier command to drain."""
        hello = coordinator_pb2.NodeHello()
        hello.CopyFrom(self._handler.hello())
        hello.draining = hello.draining or self._draining
        hello.protocol.major, hello.protocol.minor = PROTOCOL.major, PROTOCOL.minor
        hello.wall_s = self._clock.wall_s()
        process = this_process()
        hello.process.version, hello.process.host = process.version, process.host
        hello.process.metrics_address, hello.process.traces_folder = process.metrics_address, process.traces_folder
        return hello

    async def _welcome(self, call: Any) -> float:
        message = await call.read()
        if message is EOF or message.WhichOneof("message") != "welcome":
            raise Unavailable("the coordinator ended the stream without a welcome")
        check_protocol(
            PROTOCOL,
            reported_protocol(message.welcome),
            node_name=f"node {self._handler.hello().node_id}",
            node_build=this_process().version,
        )
        if message.welcome.wall_s:
            ahead_s = self._clock.wall_s() - message.welcome.wall_s
            if warning := clock_warning(ahead_s, f"this host, {this_process().host},"):
                _log.warning("%s", warning)
        self.coordinator_id = message.welcome.coordinator_id
        return float(message.welcome.heartbeat_s)

    async def _talk(self, call: Any, heartbeat_s: float) -> None:
        commands: asyncio.Queue[coordinator_pb2.JoinResponse] = asyncio.Queue(self._config.commands_max)
        parts = [
            asyncio.create_task(self._report(call, heartbeat_s)),
            asyncio.create_task(self._listen(call, commands)),
            asyncio.create_task(self._execute(commands)),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            for part in parts:
                part.cancel()
            results = await asyncio.gather(*parts, return_exceptions=True)
        for part, result in zip(parts, results, strict=True):
            if part in done and isinstance(result, BaseException):
                raise result

    async def _report(self, call: Any, heartbeat_s: float) -> None:
        while True:
            leaving = self._leaving
            self._urgent.clear()
            report = self._handler.report()
            report.leaving = leaving
            weights, self._weights = self._weights, []
            report.weights.extend(weights)
            with typed_errors():
                await _send(call, coordinator_pb2.JoinRequest(report=report))
                if leaving:
                    await call.done_writing()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._config.leave_s):
                            await call.code()  # the coordinator has read the last report when it ends the call
                    return
            await self._heartbeat(heartbeat_s)

    async def _heartbeat(self, heartbeat_s: float) -> None:
        """Wait until the next report is due or urgent."""
        urgent = asyncio.create_task(self._urgent.wait())
        due = asyncio.create_task(self._clock.sleep(heartbeat_s))
        try:
            await asyncio.wait([urgent, due], return_when=asyncio.FIRST_COMPLETED)
        finally:
            urgent.cancel()
            due.cancel()

    async def _listen(self, call: Any, commands: asyncio.Queue[coordinator_pb2.JoinResponse]) -> None:
        with typed_errors():
            while (message := await call.read()) is not EOF:
                if message.WhichOneof("message") == "fleet":
                    self.fleet.replace(message.fleet.nodes)
                    continue
                try:
                    commands.put_nowait(message)
                except asyncio.QueueFull:
                    raise Unavailable(
                        f"{commands.maxsize} commands wait for this node's handler: it is stuck"
                    ) from None
        raise Unavailable("the coordinator ended the stream")

    async def _execute(self, commands: asyncio.Queue[coordinator_pb2.JoinResponse]) -> None:
        verbs: dict[str, Callable[[coordinator_pb2.JoinResponse], Awaitable[None]]] = {
            "weights": lambda message: self._handler.on_weights(message.weights),
            "cancel": lambda message: self._handler.on_cancel(message.cancel),
            "drain": lambda message: self._on_drain(),
        }
        while True:
            message = await commands.get()
            verb = verbs.get(message.WhichOneof("message") or "")
            if verb is not None:  # a newer coordinator may send messages that this version does not know
                await verb(message)

    async def _on_drain(self) -> None:
        self._draining = True
        await self._handler.on_drain()


def reported_protocol(message: Any) -> ProtocolVersion:
    """Return the field `protocol` of a hello, a welcome or a description of the mesh; `UNREPORTED` if it is absent."""
    if not message.HasField("protocol"):
        return UNREPORTED
    return ProtocolVersion(major=message.protocol.major, minor=message.protocol.minor)


async def _send(call: Any, message: coordinator_pb2.JoinRequest) -> None:
    """Write, or raise the final status of the call. grpc.aio reports to a writer only that the call has ended."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        await call.wait_for_connection()
        raise Unavailable("the coordinator ended the stream") from None


def _log_crash(task: asyncio.Task[None]) -> None:
    """A bug in a handler ends the membership. `stop` raises it again."""
    if not task.cancelled() and (err := task.exception()) is not None:
        _log.critical("%s ended by a bug", task.get_name(), exc_info=err)
