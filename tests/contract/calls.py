"""Calls over bare gRPC stubs. They return status code and reason, and are recorded for the report of a failure."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from rollmesh.shared.errors import MeshError

from .model import Violation

T = TypeVar("T")
CALL_S = 30.0
LOST = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
NEVER = frozenset({"UNKNOWN", "INTERNAL"})
BACKOFF_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a call."""

    code: str
    reason: str
    message: str
    response: Any
    repeated: bool = False
    """Whether an earlier response to the same request was lost."""

    @property
    def ok(self) -> bool:
        return self.code == "OK"

    def __str__(self) -> str:
        return self.code if self.ok else f"{self.code}:{self.reason} ({self.message[:200]})"


@dataclass(slots=True)
class Calls:
    """Makes calls. `patience_s` limits the retries after lost responses; 0 in a mesh without kills."""

    patience_s: float = 0.0
    log: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    counts: Counter[str] = field(default_factory=Counter)

    async def call(self, method: Any, request: Any, *, also_lost: Sequence[str] = ()) -> Answer:
        """Return the response of a unary or server-streaming method. `also_lost` are reasons after which the request is
        repeated."""
        until, repeated = time.monotonic() + self.patience_s, False
        while True:
            answer = await self._once(method, request, repeated)
            self.log.append(f"{type(request).__name__} {_short(request)} -> {answer}")
            self.counts[f"{type(request).__name__} {answer.code}"] += 1
            if answer.code in NEVER:
                raise Violation(f"{type(request).__name__} was answered {answer}")
            lost = answer.code in LOST or answer.reason in also_lost
            if not lost or time.monotonic() > until:
                return answer
            repeated = True
            await asyncio.sleep(BACKOFF_S)

    async def read_for(self, method: Any, request: Any, seconds: float) -> tuple[Answer, list[Any]]:
        """Return the messages of a stream in `seconds`, and how it ended, which is DEADLINE_EXCEEDED if it lasted
        longer."""
        messages: list[Any] = []
        answer = Answer("OK", "", "", messages)
        try:
            async for one in method(request, timeout=seconds):
                messages.append(one)
        except grpc.aio.AioRpcError as error:
            answer = Answer(error.code().name, _reason(error), error.details() or "", messages)
        self.log.append(f"{type(request).__name__} {_short(request)} -> {len(messages)} messages, {answer}")
        self.counts[f"{type(request).__name__} {answer.code}"] += 1
        if answer.code in NEVER:
            raise Violation(f"{type(request).__name__} was answered {answer}")
        return answer, messages

    async def persist(self, action: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a repeatable action once the killed services are back."""
        until = time.monotonic() + self.patience_s
        while True:
            try:
                return await action()
            except (MeshError, grpc.aio.AioRpcError) as error:
                if time.monotonic() > until:
                    raise Violation(f"an action failed: {error}") from error
            await asyncio.sleep(BACKOFF_S)

    async def _once(self, method: Any, request: Any, repeated: bool) -> Answer:
        call = method(request, timeout=CALL_S)
        try:
            response = [one async for one in call] if isinstance(call, grpc.aio.UnaryStreamCall) else await call
        except grpc.aio.AioRpcError as error:
            return Answer(error.code().name, _reason(error), error.details() or "", None, repeated)
        return Answer("OK", "", "", response, repeated)


def _reason(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    details = status.details if status is not None else ()
    return next((info.reason for detail in details if detail.Unpack(info)), "")


def _short(request: Any) -> str:
    return str(request).replace("\n", " ")[:300]
