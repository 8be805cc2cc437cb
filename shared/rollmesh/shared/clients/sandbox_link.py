"""The long-lived Work stream to one sandbox node, multiplexed by request id.

The stream opens with the first request and reopens after a failure. Requests in flight then fail, because their outcome
is unknown. Sessions remain open at the node and are used over the next stream. Ends of sessions are posted without
waiting, also from a cancelled task, and posted again on a new stream until the node has confirmed them.

Calls of stateless functions that are made in one turn of the event loop are sent in one message.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from rollmesh.shared.codec.failure import decode_failure
from rollmesh.shared.errors import DeadlineExceeded, MeshError, SandboxFailed
from rollmesh.shared.rpc.channel import connected_address
from rollmesh.shared.rpc.status import from_rpc_error, typed_errors
from rollmesh.shared.telemetry.logs import apart
from rollmesh.shared.telemetry.tracing import traceparent
from rollmesh.v1 import sandbox_pb2, sandbox_pb2_grpc

_Queue = asyncio.Queue[sandbox_pb2.WorkRequest | None]
"""Messages to send on one stream; None ends it. Bounded by the request slots and the number of sessions."""

Connect = Callable[[str], grpc.aio.Channel]
_CALLS_MAX = 256
_CALLS_BYTES_MAX = 1 << 20
"""Maximum calls, and bytes of their arguments, in one message."""
OnOutput = Callable[[int, str], None]
"""Receives a piece of a command's output: its descriptor (1 or 2) and its text."""


class WorkLink:
    """The stream to the node at `address`."""

    def __init__(self, address: str, connect: Connect, *, inflight_max: int) -> None:
        self.address = address
        self.num_sessions = 0
        """Number of open sessions on this link. The pool updates it."""
        self._connect = connect
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._outgoing = _Queue()
        self._pending: dict[str, asyncio.Future[sandbox_pb2.WorkResponse]] = {}
        self._listeners: dict[str, OnOutput] = {}
        self._closing: dict[str, sandbox_pb2.WorkRequest] = {}
        self._all_closed = asyncio.Event()
        self._calls: dict[int, asyncio.Future[sandbox_pb2.StatelessResult]] = {}
        self._unsent: dict[tuple[str, str], list[sandbox_pb2.StatelessCall]] = {}
        """Calls to send in this turn of the event loop, by profile and tenant."""
        self._places = asyncio.Semaphore(inflight_max)
        self._numbers = itertools.count(1)

    @property
    def num_pending(self) -> int:
        """Number of sent requests without a response."""
        return len(self._pending) + len(self._calls)

    @property
    def load(self) -> int:
        """Number of open sessions and of calls without a result."""
        return self.num_sessions + len(self._calls)

    async def request(
        self, command: sandbox_pb2.WorkRequest, *, limit_s: float, on_output: OnOutput | None = None
    ) -> sandbox_pb2.WorkResponse:
        """Send a command and return its response. Earlier output is passed to `on_output`, which must not wait.

        This sets the request id. Raise a rejection as a `MeshError`, `SandboxFailed` if the node ends the stream
        meanwhile, `ConnectionLost` if it breaks, or `DeadlineExceeded` after `limit_s` seconds.
        """
        try:
            async with asyncio.timeout(limit_s), self._places:
                answer = await self._exchange(command, on_output)
        except TimeoutError as err:
            raise self._late(limit_s) from err
        if answer.WhichOneof("answer") == "failure":
            raise decode_failure(answer.failure)
        return answer

    async def call(
        self, call: sandbox_pb2.StatelessCall, *, profile: str, tenant: str, limit_s: float
    ) -> sandbox_pb2.ExecResult:
        """Call a stateless function and return its result. This sets the call id. Raise as `request`."""
        call.call_id = next(self._numbers)
        call.traceparent = traceparent()
        try:
            async with asyncio.timeout(limit_s), self._places:
                answer: asyncio.Future[sandbox_pb2.StatelessResult] = asyncio.get_running_loop().create_future()
                self._calls[call.call_id] = answer
                try:
                    if not self._unsent:
                        asyncio.get_running_loop().call_soon(self._send_calls, context=apart())
                    self._unsent.setdefault((profile, tenant), []).append(call)
                    result = await answer
                finally:
                    del self._calls[call.call_id]
        except TimeoutError as err:
            raise self._late(limit_s) from err
        if result.WhichOneof("answer") == "failure":
            raise decode_failure(result.failure)
        return result.result

    async def run_tests(self, request: sandbox_pb2.RunTestsRequest, *, limit_s: float) -> sandbox_pb2.RunTestsResponse:
        """Run hidden tests in a unary call, outside the stream. Raise `MeshError`."""
        if self._channel is None:
            self._channel = self._connect(self.address)
        stub: sandbox_pb2_grpc.SandboxServiceAsyncStub = sandbox_pb2_grpc.SandboxServiceStub(self._channel)
        with typed_errors(await connected_address(self._channel, self.address)):
            return await stub.RunTests(request, timeout=limit_s)

    def post_close(self, session_id: str) -> None:
        """End a session without waiting for the confirmation."""
        command = sandbox_pb2.WorkRequest(
            request_id=f"{next(self._numbers)}", session_id=session_id, close=sandbox_pb2.CloseSession()
        )
        self._closing[session_id] = command
        self._all_closed.clear()
        self._outgoing.put_nowait(command)
        self._ensure_stream()

    async def close(self, *, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for the confirmation of posted closes, then close the stream."""
        if self._task is not None:
            if self._closing:
                confirmed = asyncio.ensure_future(self._all_closed.wait())
                await asyncio.wait([confirmed, self._task], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                confirmed.cancel()
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._channel is not None:
            await self._channel.close(None)
        self._fail_pending(SandboxFailed("the sandbox client was closed"))

    async def _exchange(self, command: sandbox_pb2.WorkRequest, on_output: OnOutput | None) -> sandbox_pb2.WorkResponse:
        command.request_id = f"{next(self._numbers)}"
        command.traceparent = traceparent()
        answer: asyncio.Future[sandbox_pb2.WorkResponse] = asyncio.get_running_loop().create_future()
        self._pending[command.request_id] = answer
        if on_output is not None:
            self._listeners[command.request_id] = on_output
        try:
            self._outgoing.put_nowait(command)
            self._ensure_stream()
            return await answer
        finally:
            del self._pending[command.request_id]
            self._listeners.pop(command.request_id, None)

    def _late(self, limit_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"sandbox {self.address} did not respond within {limit_s} s; retry elsewhere", address=self.address
        )

    def _send_calls(self) -> None:
        """Send the calls of this turn of the event loop that are still awaited."""
        unsent, self._unsent = self._unsent, {}
        for (profile, tenant), calls in unsent.items():
            message = sandbox_pb2.CallStateless(profile=profile, tenant=tenant)
            room = _CALLS_BYTES_MAX
            for call in calls:
                if call.call_id not in self._calls:
                    continue
                room -= call.ByteSize()
                if message.calls and (room < 0 or len(message.calls) == _CALLS_MAX):
                    self._outgoing.put_nowait(sandbox_pb2.WorkRequest(stateless=message))
                    message.ClearField("calls")
                    room = _CALLS_BYTES_MAX - call.ByteSize()
                message.calls.append(call)
            if message.calls:
                self._outgoing.put_nowait(sandbox_pb2.WorkRequest(stateless=message))
        self._ensure_stream()

    # The stream -------------------------------------------------------------------------------------------------------

    def _ensure_stream(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve(), context=apart())

    async def _serve(self) -> None:
        if self._channel is None:
            self._channel = self._connect(self.address)
        stub: sandbox_pb2_grpc.SandboxServiceAsyncStub = sandbox_pb2_grpc.SandboxServiceStub(self._channel)
        cause: MeshError = SandboxFailed(
            f"sandbox {self.address} ended the stream; retry elsewhere", address=self.address
        )
        outgoing, sent_to = self._outgoing, ""
        try:
            sent_to = await connected_address(self._channel, self.address)
            async for answer in stub.Work(_requests(outgoing)):
                self._take(answer)
        except grpc.aio.AioRpcError as err:
            cause = from_rpc_error(err, sent_to)
        finally:
            # gRPC may leave the reader of a broken stream waiting; it must not read messages of the next one.
            outgoing.put_nowait(None)
            self._outgoing = _Queue()
            for command in self._closing.values():
                self._outgoing.put_nowait(command)
            self._fail_pending(cause)

    def _take(self, answer: sandbox_pb2.WorkResponse) -> None:
        kind = answer.WhichOneof("answer")
        if kind == "stateless":
            for result in answer.stateless.results:
                called = self._calls.get(result.call_id)
                if called is not None and not called.done():
                    called.set_result(result)
            return
        if kind == "output":
            if (listener := self._listeners.get(answer.request_id)) is not None:
                listener(answer.output.descriptor, answer.output.text)
            return
        waiting = self._pending.get(answer.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
            return
        closing = self._closing.get(answer.session_id)
        if closing is not None and closing.request_id == answer.request_id:
            del self._closing[answer.session_id]  # the session is closed, or unknown to the node
            if not self._closing:
                self._all_closed.set()

    def _fail_pending(self, cause: MeshError) -> None:
        waiting: Iterable[asyncio.Future[Any]] = itertools.chain(self._pending.values(), self._calls.values())
        for future in waiting:
            if not future.done():
                future.set_exception(cause)


async def _requests(outgoing: _Queue) -> AsyncIterator[sandbox_pb2.WorkRequest]:
    while (command := await outgoing.get()) is not None:
        yield command
