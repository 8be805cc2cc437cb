"""Client of a fleet of sandbox nodes: sessions over one stream per node.

    async with client.session("python", session_id="e1.1", owner="run/e1", ttl_s=600) as session:
        result = await session.run("2 + 2")
    result = await client.call_stateless("calc", "call", "2+2", tenant="run")

A session opens on the node with the fewest sessions of this client. A node that rejects it is skipped. If all nodes
reject it, the client retries with back-off, up to a limit. A session always ends with its block: the message is queued
without waiting, so a cancelled task does not leave a session open. An error of the program is an `ExecResult`; an error
of the mesh is a `MeshError`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from rollmesh.shared.clients.hidden_tests import TestReport, read_report, tests_request
from rollmesh.shared.clients.sandbox_link import Connect, OnOutput, WorkLink
from rollmesh.shared.clock import Clock
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.errors import ConnectionLost, MeshError, NoNode, Overloaded
from rollmesh.shared.net.retry import is_away, pause_after
from rollmesh.shared.telemetry.logs import apart
from rollmesh.v1 import sandbox_pb2

_T = TypeVar("_T")


class SandboxClientConfig(Settings):
    """Limits of the sandbox client."""

    inflight_max: PositiveInt = 1024
    """Maximum number of concurrent commands to one node; further ones wait."""
    command_s_max: PositiveFloat = 60.0
    """Maximum wait for the response to a command in addition to its time limit, seconds."""
    open_s_max: PositiveFloat = 45.0
    """Retry limit for opening a session, seconds; then the last rejection is raised."""
    tries_max: PositiveInt = 5
    """Maximum number of attempts of one request during which the connection to the node is lost, over all nodes."""
    backoff_s: PositiveFloat = 0.05
    """First back-off after every node has rejected a session, seconds; doubles up to `backoff_s_max`."""
    backoff_s_max: PositiveFloat = 2.0
    """Maximum back-off, seconds."""
    judgment_s_max: PositiveFloat = 600.0
    """Timeout of a run of hidden tests, including the wait for a slot at the node, in seconds."""
    close_s_max: PositiveFloat = 2.0
    """Maximum wait at shutdown for nodes to confirm ended sessions, seconds. Then the sessions expire."""


class ExecOutcome(IntEnum):
    """The outcome of a command. Numbers equal `rollmesh.v1.ExecOutcome`. The program causes all outcomes but
    INFRA_FAILURE."""

    OK = 1
    ERROR = 2
    TIME_LIMIT = 3
    MEMORY_LIMIT = 4
    PROCESS_LIMIT = 5
    INFRA_FAILURE = 6
    OUTPUT_LIMIT = 7
    EXITED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of a command; the fields are those of `rollmesh.v1.ExecResult`."""

    outcome: ExecOutcome
    stdout: str = ""
    stderr: str = ""
    result: str = ""
    error: str = ""
    truncated: bool = False
    wall_s: float = 0.0
    session_alive: bool = True
    exit_status: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Existing files of `return_paths`, by path."""
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSnapshot:
    """A saved session, stored only on the node at `address`."""

    snapshot_id: str
    address: str
    num_bytes: int
    lost: tuple[str, ...]
    """Names that could not be saved: undefined after a fork or restore."""


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A piece of a command's output."""

    descriptor: int
    """1 stdout, 2 stderr; for bash always 1."""
    text: str


class RemoteSession:
    """An open session. Commands run in the order of the calls. Do not use it after its block."""

    def __init__(self, link: WorkLink, session_id: str, config: SandboxClientConfig, clock: Clock) -> None:
        self._link = link
        self._session_id = session_id
        self._config = config
        self._clock = clock

    async def call(self, function: str, *arguments: str, wall_s: float = 0.0) -> ExecResult:
        """Call a function of the profile. `wall_s` 0 means the session's limit. Raise `MeshError`."""
        command = sandbox_pb2.CallFunction(function=function, arguments=arguments, wall_s=wall_s)
        return await self._execute(sandbox_pb2.WorkRequest(session_id=self._session_id, call=command), wall_s)

    async def run(
        self,
        code: str,
        *,
        language: str = "python",
        stdin: bytes = b"",
        arguments: Sequence[str] = (),
        return_paths: Sequence[str] = (),
        wall_s: float = 0.0,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run source text. Definitions of Python and bash persist until the next run. Raise `MeshError`.

        `stdin` and `arguments` are for the compiled languages; for SQL the first argument is the path of the database.
        The result contains the regular files of `return_paths` that exist afterwards. `on_output` receives the stored
        output while it is printed; the result contains all of it again.
        """
        command = sandbox_pb2.RunCode(
            language=language, code=code, stdin=stdin, arguments=arguments, return_paths=return_paths, wall_s=wall_s
        )
        command.stream = on_output is not None
        return await self._execute(sandbox_pb2.WorkRequest(session_id=self._session_id, run=command), wall_s, on_output)

    async def snapshot(self, *, ttl_s: float = 0.0) -> RemoteSnapshot:
        """Save files and Python state. The snapshot expires after `ttl_s` without use; 0 means the node's default.
        Raise `MeshError`."""
        command = sandbox_pb2.SnapshotSession(ttl_s=ttl_s)
        answer = await self._ask(sandbox_pb2.WorkRequest(session_id=self._session_id, snapshot=command))
        taken = answer.snapshot
        return RemoteSnapshot(
            snapshot_id=taken.snapshot_id,
            address=self._link.address,
            num_bytes=taken.num_bytes,
            lost=tuple(taken.lost),
        )

    async def restore(self, snapshot: RemoteSnapshot) -> None:
        """Undo the changes of the session since the snapshot. If this fails for another reason than the snapshot, the
        session is gone."""
        command = sandbox_pb2.RestoreSession(snapshot_id=snapshot.snapshot_id)
        await self._ask(sandbox_pb2.WorkRequest(session_id=self._session_id, restore=command))

    async def _ask(self, command: sandbox_pb2.WorkRequest) -> sandbox_pb2.WorkResponse:
        return await self._link.request(command, limit_s=self._config.command_s_max)

    async def stream(self, code: str, **options: Any) -> AsyncIterator[OutputPiece | ExecResult]:
        """Run as `run` with its options. Yield pieces of output when they are printed, and the result as the last item.

        An early end of the iteration does not end the program. Raise `MeshError`.
        """
        arrived: asyncio.Queue[OutputPiece | None] = asyncio.Queue()  # bounded by the session's limit of output

        def put(descriptor: int, text: str) -> None:
            arrived.put_nowait(OutputPiece(descriptor, text))

        running = asyncio.ensure_future(self.run(code, on_output=put, **options))
        running.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (piece := await arrived.get()) is not None:
                yield piece
            yield await running
        finally:
            running.cancel()

    async def _execute(
        self, command: sandbox_pb2.WorkRequest, wall_s: float, on_output: OnOutput | None = None
    ) -> ExecResult:
        """Execute a command. If the tenant's quota rejects it, it has not started and is retried for `open_s_max`."""
        end_s = self._clock.monotonic_s() + self._config.open_s_max
        while True:
            try:
                answer = await self._link.request(
                    command, limit_s=wall_s + self._config.command_s_max, on_output=on_output
                )
                return _exec_result(answer.result)
            except Overloaded as err:
                pause_s = err.retry_after_s or self._config.backoff_s_max
                if self._clock.monotonic_s() + pause_s > end_s:
                    raise
                await self._clock.sleep(pause_s)


class SandboxClient:
    """Sessions on the nodes that `addresses` currently returns."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        connect: Connect,
        clock: Clock,
        config: SandboxClientConfig | None = None,
    ) -> None:
        self._addresses = addresses
        self._connect = connect
        self._clock = clock
        self._config = config or SandboxClientConfig()
        self._links: dict[str, WorkLink] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._num_waiting = 0
        self._last_refusal = ""

    @property
    def num_sessions(self) -> int:
        """Number of sessions that are open or being opened."""
        return sum(link.num_sessions for link in self._links.values())

    @property
    def waiting_for(self) -> str:
        """Cause of the wait for a session; empty if no caller waits."""
        if not self._num_waiting:
            return ""
        return f"a sandbox for {count_of(self._num_waiting, 'session')}: {self._last_refusal}"

    @property
    def num_pending(self) -> int:
        """Number of running commands."""
        return sum(link.num_pending for link in self._links.values())

    @asynccontextmanager
    async def session(
        self, profile: str, *, session_id: str, owner: str = "", ttl_s: float = 0.0, tenant: str = ""
    ) -> AsyncIterator[RemoteSession]:
        """Open a session of `profile`. `session_id` is unique among the mesh's live sessions.

        `ttl_s`: idle seconds after which the node ends the session; 0 means the node's default. `tenant`: the quota on
        the node that it counts against. Raise `Overloaded` or another `MeshError` if no node opens one within
        `open_s_max`.
        """
        opening = sandbox_pb2.OpenSession(profile=profile, ttl_s=ttl_s, owner=owner, tenant=tenant)
        async with self._opened(session_id, sandbox_pb2.WorkRequest(open=opening)) as session:
            yield session

    @asynccontextmanager
    async def fork(
        self, snapshot: RemoteSnapshot, *, session_id: str, owner: str = "", ttl_s: float = 0.0
    ) -> AsyncIterator[RemoteSession]:
        """Open a session in the state of `snapshot`, on its node. The limit of the wait is that of `session`.

        Raise `UnknownSnapshot` if it was dropped, expired, or its node restarted; otherwise as `session`.
        """
        forking = sandbox_pb2.ForkSession(snapshot_id=snapshot.snapshot_id, ttl_s=ttl_s, owner=owner)
        async with self._opened(session_id, sandbox_pb2.WorkRequest(fork=forking), only=snapshot.address) as session:
            yield session

    async def call_stateless(
        self, profile: str, function: str, *arguments: str, tenant: str, call_key: str = "", wall_s: float = 0.0
    ) -> ExecResult:
        """Call a function that the profile declares stateless, without a session. `wall_s` 0 means the profile's limit.

        If the node or its session fails, the call is repeated, if possible on another node, within `open_s_max`.
        `call_key` is ignored. Raise `InvalidInput` for a function that is not declared stateless, `Overloaded`, or
        another `MeshError`.
        """
        del call_key
        limit_s = wall_s + self._config.command_s_max

        async def call_on(link: WorkLink) -> sandbox_pb2.ExecResult:
            call = sandbox_pb2.StatelessCall(function=function, arguments=arguments, wall_s=wall_s)
            return await link.call(call, profile=profile, tenant=tenant, limit_s=limit_s)

        return _exec_result(await self._on_some_node(call_on))

    async def drop(self, snapshot: RemoteSnapshot) -> None:
        """Delete a snapshot before it expires. No effect on an unknown one. Raise `MeshError`."""
        command = sandbox_pb2.WorkRequest(drop=sandbox_pb2.DropSnapshot(snapshot_id=snapshot.snapshot_id))
        await self._link(snapshot.address).request(command, limit_s=self._config.command_s_max)

    @asynccontextmanager
    async def _opened(
        self, session_id: str, opening: sandbox_pb2.WorkRequest, only: str = ""
    ) -> AsyncIterator[RemoteSession]:
        link, opened_id = await self._open(session_id, opening, only)
        try:
            yield RemoteSession(link, opened_id, self._config, self._clock)
        finally:
            link.num_sessions -= 1
            link.post_close(opened_id)

    async def run_tests(
        self,
        files: Mapping[str, bytes],
        *,
        oracle_ref: str = "",
        manifest: str = "",
        limits: Mapping[str, float] | None = None,
        owner: str = "",
        budget_s: float = 0.0,
    ) -> TestReport:
        """Judge a candidate's files with the hidden tests of a node's store, or with those of a manifest (JSON).

        `budget_s` > 0 limits the seconds that the candidate takes in all tests; the remaining tests count as TLE.

        If the node or the jail fails, the tests are repeated, if possible on another node, within `open_s_max`. Raise
        `UnknownOracle`, `BrokenOracle`, `InvalidInput` or another `MeshError`, never for an error of the candidate.
        """
        request = tests_request(
            files, oracle_ref=oracle_ref, manifest=manifest, limits=limits, owner=owner, budget_s=budget_s
        )

        async def judge_on(link: WorkLink) -> TestReport:
            link.num_sessions += 1
            try:
                return read_report(await link.run_tests(request, limit_s=self._config.judgment_s_max))
            finally:
                link.num_sessions -= 1

        return await self._on_some_node(judge_on)

    async def close(self) -> None:
        """Close the streams. Posted ends of sessions have `close_s_max` to arrive."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close(limit_s=self._config.close_s_max) for link in links), *self._retiring)

    async def _open(self, session_id: str, opening: sandbox_pb2.WorkRequest, only: str) -> tuple[WorkLink, str]:
        numbers = itertools.count()

        async def open_on(link: WorkLink) -> tuple[WorkLink, str]:
            # An attempt without a received response may have opened a session with its id, so every attempt has a
            # separate id.
            number = next(numbers)
            opened_id = f"{session_id}.{number}" if number else session_id
            await self._open_on(link, opened_id, opening)
            return link, opened_id

        return await self._on_some_node(open_on, only)

    async def _on_some_node(self, attempt: Callable[[WorkLink], Awaitable[_T]], only: str = "") -> _T:
        """Try node after node, or the `only` one, while rejections are temporary, for `open_s_max`; then raise the
        last.

        At most `tries_max` attempts may lose their connection, because the request itself may have ended the process of
        the node.
        """
        end_s = self._clock.monotonic_s() + self._config.open_s_max
        num_rounds = num_lost = 0
        refusal: MeshError = NoNode("no sandbox node has joined; start one, or wait until it joins")
        refused: set[str] = set()
        while True:
            link = self._least_used(refused, only)
            if link is None:
                num_rounds += 1
                pause_s = pause_after(num_rounds, self._config.backoff_s, self._config.backoff_s_max)
                if self._clock.monotonic_s() + pause_s > end_s:
                    if is_away(refusal) and not isinstance(refusal, NoNode):
                        raise NoNode(
                            f"no sandbox node served for {self._config.open_s_max:g} s: {refusal}"
                        ) from refusal
                    raise refusal
                await self._wait(pause_s, refusal)
                refused.clear()
                continue
            try:
                return await attempt(link)
            except MeshError as err:
                num_lost += isinstance(err, ConnectionLost)
                if not err.retryable or num_lost == self._config.tries_max:
                    raise
                refusal = err
                refused.add(link.address)

    async def _wait(self, pause_s: float, refusal: MeshError) -> None:
        self._num_waiting += 1
        self._last_refusal = str(refusal)
        try:
            await self._clock.sleep(pause_s)
        finally:
            self._num_waiting -= 1

    async def _open_on(self, link: WorkLink, session_id: str, opening: sandbox_pb2.WorkRequest) -> None:
        link.num_sessions += 1
        try:
            command = sandbox_pb2.WorkRequest(session_id=session_id)
            command.MergeFrom(opening)
            await link.request(command, limit_s=self._config.command_s_max)
        except BaseException as err:
            link.num_sessions -= 1
            if not isinstance(err, MeshError) or err.reason != "OVERLOADED":
                link.post_close(session_id)  # cancelled or response lost, so the session may be open at the node
            raise

    def _least_used(self, refused: set[str], only: str) -> WorkLink | None:
        addresses = list(dict.fromkeys(self._addresses()))
        for gone in [a for a, link in self._links.items() if a not in addresses and not link.load]:
            self._retire(self._links.pop(gone))
        candidates = [self._link(address) for address in ([only] if only else addresses) if address not in refused]
        return min(candidates, key=lambda link: link.load, default=None)

    def _retire(self, link: WorkLink) -> None:
        """End the stream to a node that left, in a task, so that opening a session need not wait for it."""
        task = asyncio.create_task(link.close(limit_s=self._config.close_s_max), context=apart())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _link(self, address: str) -> WorkLink:
        if address not in self._links:
            self._links[address] = WorkLink(address, self._connect, inflight_max=self._config.inflight_max)
        return self._links[address]


def _exec_result(message: sandbox_pb2.ExecResult) -> ExecResult:
    return ExecResult(
        outcome=_outcome(message.outcome),
        stdout=message.stdout,
        stderr=message.stderr,
        result=message.result,
        error=message.error,
        truncated=message.truncated,
        wall_s=message.wall_s,
        session_alive=message.session_alive,
        exit_status=message.exit_status,
        files={file.path: file.content for file in message.files},
        cpu_s=message.cpu_s,
    )


def _outcome(number: int) -> ExecOutcome:
    """Return the outcome. A newer node may return further program errors; only a missing outcome is an error of the
    node."""
    if number in set(ExecOutcome):
        return ExecOutcome(number)
    return ExecOutcome.ERROR if number else ExecOutcome.INFRA_FAILURE
