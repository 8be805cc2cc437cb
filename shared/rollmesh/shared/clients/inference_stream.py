"""The connections of this process to one inference node: the long-lived Generate stream that all requests share, and
scoring calls.

The stream opens with the first request and reopens after a loss. A loss ends every request on it with the error; the
callers continue at another node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import MeshError, Unavailable
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.telemetry.logs import apart
from rollmesh.shared.telemetry.tracing import traceparent
from rollmesh.v1 import inference_pb2, inference_pb2_grpc, types_pb2

Reply = inference_pb2.GenerateDelta | MeshError
"""A delta, or the error that ended the stream."""


class StreamRequest:
    """One request on a node. It queues replies of at most `max_tokens` tokens."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._replies: deque[Reply] = deque()
        self._arrived: asyncio.Future[None] | None = None

    def put(self, reply: Reply) -> None:
        """Append a reply and wake the reader."""
        self._replies.append(reply)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def get(self) -> Reply:
        """Wait for the next reply and return it. A request has one reader."""
        while not self._replies:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return self._replies.popleft()


class GenerateLink:
    """Multiplex requests. Use it on one event loop, and call `close` before the loop ends."""

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel], clock: Clock) -> None:
        self._open_channel = open_channel
        self._clock = clock
        self.load = inference_pb2.NodeLoad()
        """The last load that the node reported, of all clients; empty before the first."""
        self.load_s = -math.inf
        """Time of the last report on the clock."""
        self.num_others = 0
        """Number of requests of other clients at the node, by that report."""
        self._ids = itertools.count()
        self._live: dict[str, StreamRequest] = {}
        self._outgoing = inference_pb2.GenerateRequest()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_live(self) -> int:
        """Number of requests without a final reply."""
        return len(self._live)

    @property
    def is_open(self) -> bool:
        """Whether there is a stream to close."""
        return self._task is not None

    def submit(self, submission: inference_pb2.Submission) -> StreamRequest:
        """Send a request with a unique id. Submissions in one iteration of the loop share one message."""
        request = StreamRequest(f"r{next(self._ids)}")
        submission.request_id = request.request_id
        submission.traceparent = traceparent()
        self._live[request.request_id] = request
        self._outgoing.submissions.append(submission)
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), context=apart())
        return request

    def cancel(self, request: StreamRequest, reason: str) -> None:
        """Cancel a request at the node; no further replies arrive. No effect if it has ended."""
        if self._live.pop(request.request_id, None) is not None and self._task is not None:
            self._outgoing.cancellations.add(request_id=request.request_id, reason=reason)
            self._wake.set()

    async def close(self) -> None:
        """Close the stream. Running requests end with Unavailable."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._fail(Unavailable("the stream to the inference node was closed"))

    async def _run(self) -> None:
        error: MeshError = Unavailable("the inference node ended the stream")
        try:
            async with self._open_channel() as channel:
                await self._serve(channel)
        except MeshError as err:
            error = err
        finally:
            if self._task is asyncio.current_task():
                self._task = None
            self._outgoing = inference_pb2.GenerateRequest()
            self._fail(error)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate()
        writer = asyncio.create_task(self._write(call))
        try:
            with typed_errors():
                async for response in call:
                    for delta in response.deltas:
                        self._deliver(delta)
                    if response.HasField("load"):  # which counts no request that this frame ended
                        self._note_load(response.load)
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.wait([writer])

    async def _write(self, call: Any) -> None:
        # A failed write means that the call has ended; the reader raises the cause.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                message, self._outgoing = self._outgoing, inference_pb2.GenerateRequest()
                await call.write(message)

    def _note_load(self, load: inference_pb2.NodeLoad) -> None:
        self.load, self.load_s = load, self._clock.monotonic_s()
        self.num_others = max(0, load.num_running + load.num_waiting - self.num_live)

    def _deliver(self, delta: inference_pb2.GenerateDelta) -> None:
        ended = delta.finish != types_pb2.FINISH_REASON_UNSPECIFIED
        request = self._live.pop(delta.request_id, None) if ended else self._live.get(delta.request_id)
        if request is not None:  # else cancelled meanwhile
            request.put(delta)

    def _fail(self, error: MeshError) -> None:
        live, self._live = self._live, {}
        for request in live.values():
            request.put(error)


class ScoreLink:
    """The scoring calls to one node, over a channel that opens with the first call. Use it on one event loop."""

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel], slots: asyncio.Semaphore) -> None:
        """`slots` bounds the concurrent calls of this process to all nodes."""
        self._open_channel = open_channel
        self._slots = slots
        self._channel: grpc.aio.Channel | None = None
        self.num_live = 0
        """Number of calls that wait for a slot or for the response."""

    async def score(self, request: inference_pb2.ScoreRequest, timeout_s: float) -> inference_pb2.ScoreResponse:
        """Return the response of the node. Raise the MeshError of a failed call."""
        self.num_live += 1
        try:
            async with self._slots:
                if self._channel is None:
                    self._channel = self._open_channel()
                stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
                with typed_errors():
                    response: inference_pb2.ScoreResponse = await stub.Score(request, timeout=timeout_s)
                    return response
        finally:
            self.num_live -= 1

    async def close(self) -> None:
        """Close the channel. Calls in progress end with Cancelled."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
