"""`DirectRpc`: the state of one direct call, which its client and its server share. It holds neither the client's call object nor a message
object: the sides exchange encoded messages, so that neither sees changes of the other.

    open -> finished: the server's status, an error of the transport, the deadline, or a cancellation; the first one stays
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from rollmesh.shared.rpc.direct.pipe import MessagePipe

Metadata = tuple[tuple[str, str | bytes], ...]


class RpcStatus(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str
    trailing: Metadata = ()


OK = RpcStatus(grpc.StatusCode.OK, "")
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
"""What a read returns after the last message."""
_LATE = RpcStatus(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class DirectRpc:
    """One call. The handler's task is cancelled when the call finishes in another way than by the handler."""

    __slots__ = (
        "_callbacks",
        "_deadline_s",
        "_initial",
        "_initial_waiters",
        "_loop",
        "_num_bytes_max",
        "_task",
        "_timer",
        "cancelled",
        "metadata",
        "method",
        "requests",
        "responses",
        "status",
    )

    def __init__(
        self, method: str, metadata: Metadata, timeout_s: float | None, num_bytes_max: tuple[int, int]
    ) -> None:
        """`num_bytes_max` are the largest messages of the client and of the server."""
        self.method = method
        self.metadata = metadata
        self.requests = MessagePipe()
        self.responses = MessagePipe()
        self.status: RpcStatus | None = None
        """None while the call is open."""
        self.cancelled = False
        """Whether the client has cancelled the call."""
        self._num_bytes_max = num_bytes_max
        self._loop = asyncio.get_running_loop()
        self._callbacks: list[Callable[[], object]] = []
        self._initial: Metadata | None = None
        self._initial_waiters: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        if timeout_s is not None:
            if timeout_s <= 0:
                self.finish(_LATE)
            else:
                self._timer = self._loop.call_later(timeout_s, self.finish, _LATE)

    def run_by(self, task: asyncio.Task[None]) -> None:
        """Note the task of the handler."""
        self._task = task

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._loop.time())

    # Messages ---------------------------------------------------------------------------------------------------------

    def admits_request(self, message: bytes) -> bool:
        """Return whether a request is within the limits of both sides. Otherwise the call fails."""
        client_max, server_max = self._num_bytes_max
        return self._admits(message, {"CLIENT: Sent": client_max, "SERVER: Received": server_max})

    def admits_response(self, message: bytes) -> bool:
        """Return whether a response is within the limits of both sides. Otherwise the call fails."""
        client_max, server_max = self._num_bytes_max
        return self._admits(message, {"SERVER: Sent": server_max, "CLIENT: Received": client_max})

    def _admits(self, message: bytes, limits: dict[str, int]) -> bool:
        for what, limit in limits.items():
            if len(message) > limit:
                details = f"{what} message larger than max ({len(message)} vs. {limit})"
                self.finish(RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, details))
                return False
        return True

    # Metadata and the end ---------------------------------------------------------------------------------------------

    def begin_response(self, metadata: Metadata = ()) -> None:
        """Send the initial metadata, unless that has happened."""
        if self._initial is None:
            self._initial = metadata
            waiters, self._initial_waiters = self._initial_waiters, []
            for waiter in waiters:
                _settle(waiter)

    def responding(self) -> asyncio.Future[None]:
        """Return a future that is done when the server has begun its response, or the call has finished."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._initial is None and self.status is None:
            self._initial_waiters.append(future)
        else:
            future.set_result(None)
        return future

    @property
    def initial_metadata(self) -> Metadata:
        """The metadata that the server sent before its first response."""
        return self._initial or ()

    def finish(self, status: RpcStatus) -> bool:
        """End the call for both sides. Return False if it has ended.

        After the handler's own end the client still reads the responses that wait. Every other end drops them and cancels the handler.
        """
        if self.status is not None:
            return False
        self.status = status
        self.begin_response()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task, self._task = self._task, None
        if task is None or task is asyncio.current_task():
            self.responses.end()
        else:
            task.cancel()
            self.responses.abandon()
        self.requests.abandon()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        return True

    def cancel(self, details: str) -> bool:
        """End the call for the client. Return False if it has ended."""
        if self.status is None:
            self.cancelled = True
        return self.finish(RpcStatus(grpc.StatusCode.CANCELLED, details))

    def on_finish(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the call has finished, at once if it has."""
        if self.status is None:
            self._callbacks.append(callback)
        else:
            callback()

    def finished(self) -> asyncio.Future[None]:
        """Return a future that is done when the call has finished."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.on_finish(lambda: _settle(future))
        return future

    def error(self) -> grpc.aio.AioRpcError:
        """Return the error of a call that did not end with OK."""
        assert self.status is not None
        make: Any = grpc.aio.AioRpcError
        failed: grpc.aio.AioRpcError = make(
            self.status.code,
            grpc.aio.Metadata(*self.initial_metadata),
            grpc.aio.Metadata(*self.status.trailing),
            details=self.status.details,
            debug_error_string=f"{self.method} on this event loop: {self.status.details}",
        )
        return failed


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
