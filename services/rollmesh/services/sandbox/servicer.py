"""SandboxService over gRPC: translates protobuf to the domain and back, and multiplexes many sessions over one stream.

Work runs every command of a stream as a separate task, so that a slow session delays no other. At
`commands_inflight_max` commands it stops reading the stream (back-pressure by flow control). Tasks start in the order
of their commands, and the locks of sessions are fair, so the commands of one session keep their order. When a stream
breaks, its commands run to their end, bounded by their limits, and their responses are dropped. Its sessions end soon
unless another stream uses them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from rollmesh.sandbox_runtime.program import PYTHON, Program
from rollmesh.services.sandbox.branches import Branches
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.describe import describe
from rollmesh.services.sandbox.engine import OnOutput, RunOutcome, RunResult
from rollmesh.services.sandbox.metrics import START_SECONDS, note_result
from rollmesh.services.sandbox.oracle.hidden_tests import HiddenTests
from rollmesh.services.sandbox.output_relay import Answer, OutputRelay
from rollmesh.services.sandbox.result_relay import ResultRelay
from rollmesh.services.sandbox.sessions import Holder, Sessions
from rollmesh.services.sandbox.stateless_calls import StatelessCalls
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.errors import Internal, MeshError, PayloadTooLarge, field_error
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX
from rollmesh.shared.rpc.status import MESSAGE_CHARS_MAX, METADATA_CHARS_MAX
from rollmesh.shared.telemetry import log_context, tracing
from rollmesh.shared.telemetry.metrics import observe
from rollmesh.v1 import sandbox_pb2, sandbox_pb2_grpc, types_pb2

_log = logging.getLogger(__name__)

_OUTCOMES = {
    RunOutcome.OK: sandbox_pb2.EXEC_OUTCOME_OK,
    RunOutcome.ERROR: sandbox_pb2.EXEC_OUTCOME_ERROR,
    RunOutcome.TIME: sandbox_pb2.EXEC_OUTCOME_TIME_LIMIT,
    RunOutcome.MEMORY: sandbox_pb2.EXEC_OUTCOME_MEMORY_LIMIT,
    RunOutcome.PROCESSES: sandbox_pb2.EXEC_OUTCOME_PROCESS_LIMIT,
    RunOutcome.OUTPUT: sandbox_pb2.EXEC_OUTCOME_OUTPUT_LIMIT,
    RunOutcome.EXITED: sandbox_pb2.EXEC_OUTCOME_EXITED,
}

_LIMITS = {
    "wall_s": "call_s",
    "cpu_s": "cpu_s",
    "memory_bytes": "memory_bytes",
    "processes_max": "processes_max",
    "output_bytes": "output_bytes",
    "disk_bytes": "disk_bytes",
    "cpus": "cpus",
}
"""Field of SandboxLimits -> field of Limits."""
_OVERHEAD_BYTES = 64
"""More than the bytes of a response around one result."""


class SandboxServicer(sandbox_pb2_grpc.SandboxServiceServicer):
    """Implements protos/rollmesh/v1/sandbox.proto; see the module docstring."""

    def __init__(
        self,
        sessions: Sessions,
        branches: Branches,
        stateless: StatelessCalls,
        config: SandboxConfig,
        *,
        clock: Clock,
        ids: IdSource,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        """`message_bytes_max` is the server's limit. A larger response would end its stream, and with it the commands
        of other sessions."""
        self._sessions = sessions
        self._branches = branches
        self._stateless = stateless
        self._config = config
        self._clock = clock
        self._ids = ids
        self._message_bytes_max = message_bytes_max
        self._tests = HiddenTests(sessions, config, clock=clock, ids=ids)
        self._tasks: set[asyncio.Future[None]] = set()
        """Commands in progress; one future for each request of stateless calls."""

    async def Work(
        self,
        request_iterator: AsyncIterator[sandbox_pb2.WorkRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[sandbox_pb2.WorkResponse]:
        answers: asyncio.Queue[Answer] = asyncio.Queue()  # bounded by `permits`
        permits = asyncio.Semaphore(self._config.commands_inflight_max)
        holder = Holder()
        reader = asyncio.create_task(self._read(request_iterator, answers, permits, holder))
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, OutputRelay):
                    for piece in answer.take():
                        yield piece
                    continue
                if isinstance(answer, ResultRelay):
                    pieces, num_ended = answer.take()
                    for piece in pieces:
                        yield piece
                    for _ in range(num_ended):
                        permits.release()
                    continue
                yield answer
                permits.release()
            await reader
        finally:
            self._sessions.release_holder(holder)
            reader.cancel()

    async def Exec(
        self, request: sandbox_pb2.ExecRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> sandbox_pb2.ExecResponse:
        session_id = self._ids.new("exec")
        limits = _limits(request.limits)
        await self._sessions.open(session_id, profile=request.profile, limits=limits, ttl_s=0, owner="Exec")
        try:
            result = await self._sessions.run(session_id, _program(request.run), request.run.wall_s)
        finally:
            await self._sessions.close(session_id)
        note_result(result)
        return sandbox_pb2.ExecResponse(result=_exec_result(result, session_alive=False))

    async def RunTests(
        self, request: sandbox_pb2.RunTestsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> sandbox_pb2.RunTestsResponse:
        return await self._tests.answer(request)

    async def DescribeSandbox(
        self, request: sandbox_pb2.DescribeSandboxRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> sandbox_pb2.DescribeSandboxResponse:
        return await asyncio.to_thread(describe, self._config)

    async def drain(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the commands in progress."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def _read(
        self,
        requests: AsyncIterator[sandbox_pb2.WorkRequest],
        answers: asyncio.Queue[Answer],
        permits: asyncio.Semaphore,
        holder: Holder,
    ) -> None:
        """Start a task per command. After the last command of the client wait for all responses, then end the
        stream."""
        started: set[asyncio.Future[None]] = set()
        results = ResultRelay(answers, self._message_bytes_max // 2)
        try:
            async for request in requests:
                await permits.acquire()
                task: asyncio.Future[None]
                if request.WhichOneof("command") == "stateless":
                    task = self._begin_calls(request.stateless, results)
                else:
                    task = asyncio.create_task(self._answer(request, answers, holder))
                for tasks in (started, self._tasks):
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if started:
                # Not gather: the cancelled wait of a broken stream must not cancel commands.
                await asyncio.wait(started)
        finally:
            answers.put_nowait(None)

    def _begin_calls(self, request: sandbox_pb2.CallStateless, results: ResultRelay) -> asyncio.Future[None]:
        """Submit stateless calls, whose results go to the relay. The future is done after the last one."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = len(request.calls)

        def add(message: sandbox_pb2.StatelessResult) -> None:
            nonlocal left
            left -= 1
            results.add(message, last=not left)
            if not left:
                ended.set_result(None)

        for call in request.calls:
            self._begin_call(request, call, add)
        if not request.calls:
            results.add(None, last=True)
            ended.set_result(None)
        return ended

    def _begin_call(
        self,
        request: sandbox_pb2.CallStateless,
        call: sandbox_pb2.StatelessCall,
        add: Callable[[sandbox_pb2.StatelessResult], None],
    ) -> None:
        parent = tracing.parent_of(call.traceparent)
        start_ns = tracing.now_ns() if parent is not None else 0

        def on_done(result: RunResult | MeshError) -> None:
            if parent is not None:
                tracing.record(parent, "call", "sandbox", start_ns, tracing.now_ns())
            if isinstance(result, MeshError):
                add(sandbox_pb2.StatelessResult(call_id=call.call_id, failure=_failure(result)))
                return
            note_result(result)
            message = sandbox_pb2.StatelessResult(
                call_id=call.call_id, result=_exec_result(result, session_alive=result.session_alive)
            )
            if (size := message.ByteSize()) > self._message_bytes_max - _OVERHEAD_BYTES:
                message.failure.CopyFrom(_failure(_too_large(size, self._message_bytes_max)))
            add(message)

        try:
            self._stateless.submit(
                request.profile, request.tenant, call.function, list(call.arguments), call.wall_s, on_done
            )
        except MeshError as error:
            on_done(error)

    async def _answer(
        self,
        request: sandbox_pb2.WorkRequest,
        answers: asyncio.Queue[Answer],
        holder: Holder,
    ) -> None:
        """Execute one command and queue its response. Never raises: errors and bugs are responses, too."""
        verb = request.WhichOneof("command") or ""
        with log_context(session=request.session_id), tracing.span_below(request.traceparent, verb, "sandbox"):
            relay = OutputRelay(request, answers, self._message_bytes_max // 2)
            answers.put_nowait(await self._answer_command(request, holder, relay.pass_on))

    async def _answer_command(
        self, request: sandbox_pb2.WorkRequest, holder: Holder, on_output: OnOutput
    ) -> sandbox_pb2.WorkResponse:
        answer = sandbox_pb2.WorkResponse(request_id=request.request_id, session_id=request.session_id)
        try:
            await self._execute(request, answer, holder, on_output)
            if (size := answer.ByteSize()) > self._message_bytes_max:  # gRPC would not send it
                raise _too_large(size, self._message_bytes_max)
        except MeshError as error:
            answer.failure.CopyFrom(_failure(error))
        except Exception:  # noqa: BLE001 - a bug in one command must not end the stream of the others
            _log.exception("command %s failed", request.WhichOneof("command"))
            answer.failure.CopyFrom(_failure(Internal("the command failed inside the sandbox service; see its log")))
        return answer

    async def _execute(
        self,
        request: sandbox_pb2.WorkRequest,
        answer: sandbox_pb2.WorkResponse,
        holder: Holder,
        on_output: OnOutput,
    ) -> None:
        session_id = request.session_id
        self._sessions.set_holder(session_id, holder)
        match request.WhichOneof("command"):
            case "open":
                await self._open(session_id, request.open, answer, holder)
            case "run":
                listener = on_output if request.run.stream else None
                result = await self._sessions.run(session_id, _program(request.run), request.run.wall_s, listener)
                answer.result.CopyFrom(_exec_result(result, session_alive=result.session_alive))
                note_result(result)
            case "call":
                call = request.call
                result = await self._sessions.call(session_id, call.function, call.arguments, call.wall_s)
                answer.result.CopyFrom(_exec_result(result, session_alive=result.session_alive))
                note_result(result)
            case "put_files":
                await self._sessions.put_files(
                    session_id, {file.path: file.content for file in request.put_files.files}
                )
                answer.files.SetInParent()
            case "get_files":
                files = await self._sessions.get_files(session_id, request.get_files.paths)
                answer.files.files.extend(
                    sandbox_pb2.SandboxFile(path=path, content=data) for path, data in files.items()
                )
                answer.files.SetInParent()
            case "close":
                await self._sessions.close(session_id)
                answer.closed.SetInParent()
            case "snapshot":
                taken = await self._branches.snapshot(session_id, ttl_s=request.snapshot.ttl_s)
                answer.snapshot.snapshot_id = taken.snapshot_id
                answer.snapshot.num_bytes = taken.num_bytes
                answer.snapshot.lost.extend(taken.lost)
            case "fork":
                await self._fork(session_id, request.fork, answer, holder)
            case "restore":
                await self._branches.restore(session_id, request.restore.snapshot_id)
                answer.done.SetInParent()
            case "drop":
                await self._branches.drop(request.drop.snapshot_id)
                answer.done.SetInParent()
            case "renew":
                self._sessions.renew(session_id)
                answer.done.SetInParent()
            case other:
                raise field_error("command", "be set", other)

    async def _open(
        self, session_id: str, request: sandbox_pb2.OpenSession, answer: sandbox_pb2.WorkResponse, holder: Holder
    ) -> None:
        began_s = self._clock.monotonic_s()
        await self._sessions.open(
            session_id,
            profile=request.profile,
            limits=_limits(request.limits),
            ttl_s=request.ttl_s,
            owner=request.owner,
            tenant=request.tenant,
            holder=holder,
        )
        answer.opened.start_s = self._clock.monotonic_s() - began_s
        observe(START_SECONDS, answer.opened.start_s)

    async def _fork(
        self, session_id: str, request: sandbox_pb2.ForkSession, answer: sandbox_pb2.WorkResponse, holder: Holder
    ) -> None:
        began_s = self._clock.monotonic_s()
        await self._branches.fork(
            session_id, request.snapshot_id, ttl_s=request.ttl_s, owner=request.owner, holder=holder
        )
        answer.opened.start_s = self._clock.monotonic_s() - began_s
        observe(START_SECONDS, answer.opened.start_s)


def _limits(limits: sandbox_pb2.SandboxLimits) -> dict[str, float]:
    return {ours: getattr(limits, theirs) for theirs, ours in _LIMITS.items()}


def _program(run: sandbox_pb2.RunCode) -> Program:
    return Program(
        language=run.language or PYTHON,
        code=run.code,
        stdin=run.stdin,
        arguments=tuple(run.arguments),
        return_paths=tuple(run.return_paths),
    )


def _exec_result(result: RunResult, *, session_alive: bool) -> sandbox_pb2.ExecResult:
    error = ""
    if result.outcome is not RunOutcome.OK:
        error = f"{result.error_type}: {result.error_message}".strip().removesuffix(":").replace("\n", " ")
    return sandbox_pb2.ExecResult(
        outcome=_OUTCOMES[result.outcome],
        stdout=result.stdout,
        stderr=result.stderr + result.traceback,
        result=result.result,
        error=error,
        truncated=result.truncated,
        wall_s=result.wall_s,
        session_alive=session_alive,
        exit_status=result.exit_status,
        files=[sandbox_pb2.SandboxFile(path=path, content=data) for path, data in result.files.items()],
        cpu_s=result.cpu_s,
    )


def _too_large(size: int, most: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the command was executed, but its response has {size} bytes, and a message must have at most "
        f"{most}; request less at once, or raise `message_bytes_max` on both sides"
    )


def _failure(error: MeshError) -> types_pb2.Failure:
    return types_pb2.Failure(
        code=error.code.value,
        reason=error.reason,
        message=error.message[:MESSAGE_CHARS_MAX],
        metadata={key: value[:METADATA_CHARS_MAX] for key, value in error.metadata.items()},
        retry_after_s=error.retry_after_s or 0.0,
    )
