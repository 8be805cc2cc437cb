"""The ports of an episode: generation and log-probs, sandboxes, scores, private data of tasks, the sample stream, the
coordinator.

Each port has only the methods that an episode uses. `node` passes the mesh's clients; tests pass small in-process
fakes. All ports raise `rollmesh.shared.errors.MeshError` for infra failures, and release their resources when the
awaiting task is cancelled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self

from rollmesh.shared.clients.generated import ScoredTokens, Target
from rollmesh.shared.clients.sandbox import ExecResult, RemoteSnapshot
from rollmesh.shared.domain.trajectory import (
    EndpointUse,
    EpisodeKey,
    FinishReason,
    IntArray,
    Reward,
    SamplingParams,
    Segment,
)
from rollmesh.v1 import coordinator_pb2, reward_pb2, run_pb2


class GenerationPort(Protocol):
    """One running generation. Iterate inside `async with`; an early exit cancels the request at the engine."""

    @property
    def finish(self) -> FinishReason:
        """The finish reason; UNFINISHED before the last piece."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Segment:
        """Return at least one new token, all of one version."""
        ...


class Generator(Protocol):
    """Generation and scoring on the fleet of inference nodes."""

    def open(
        self, token_ids: IntArray, params: SamplingParams, *, target: Target, session: str, key: EpisodeKey
    ) -> GenerationPort:
        """Continue the prefix `token_ids` [n]."""
        ...

    async def score(
        self, sequences: Sequence[IntArray], *, target: Target, outputs: Sequence[str] = ()
    ) -> list[ScoredTokens]:
        """Return log-probs and `outputs` of given sequences, each [n] with n >= 1, all under one version that `target`
        admits."""
        ...


class SandboxSession(Protocol):
    """An open sandbox session."""

    async def call(self, function: str, *arguments: str, wall_s: float = 0.0) -> ExecResult: ...

    async def run(
        self, code: str, *, language: str = "python", arguments: Sequence[str] = (), wall_s: float = 0.0
    ) -> ExecResult: ...

    async def snapshot(self, *, ttl_s: float = 0.0) -> RemoteSnapshot: ...


class SandboxPort(Protocol):
    """Sessions on the sandbox nodes."""

    def session(
        self, profile: str, *, session_id: str, owner: str = "", ttl_s: float = 0.0, tenant: str = ""
    ) -> AbstractAsyncContextManager[SandboxSession]:
        """Open a session on entry and end it on every exit. It counts against the quota of `tenant`."""
        ...

    def fork(
        self, snapshot: RemoteSnapshot, *, session_id: str, owner: str = "", ttl_s: float = 0.0
    ) -> AbstractAsyncContextManager[SandboxSession]:
        """Open a session in the state of a snapshot, otherwise as `session`."""
        ...

    async def call_stateless(
        self, profile: str, function: str, *arguments: str, tenant: str, call_key: str = "", wall_s: float = 0.0
    ) -> ExecResult:
        """Call a function that the profile declares stateless, in a session that the calls of `tenant` share.
        `call_key` names the call for decorators."""
        ...

    async def drop(self, snapshot: RemoteSnapshot) -> None:
        """Delete a snapshot."""
        ...


class ScoringPort(Protocol):
    """The reward service."""

    async def columns(self) -> Collection[str]:
        """Return the names of the per-token arrays that its scorers read."""
        ...

    async def score(
        self, run: str, item: reward_pb2.ScoreItem, uses: list[EndpointUse] | None = None
    ) -> list[tuple[Reward, ...]]:
        """Return the rewards per sample, in the item's order. Append to `uses` what the scorers asked of endpoints."""
        ...


class PrivateData(Protocol):
    """The private extras of tasks at the data service."""

    async def private_extras(self, *, run: str, split: str, task_id: str, names: Sequence[str]) -> Mapping[str, object]:
        """Return those of `names` that the task has."""
        ...


class SampleLog(Protocol):
    """The sample streams of the runs."""

    async def append(self, run: str, payload: bytes, *, message_id: str) -> int:
        """Store a payload and return its sequence. A repeated `message_id` within the stream's window returns the same
        sequence."""
        ...


class ApplicationPort(Protocol):
    """The applications that open episodes, behind the coordinator."""

    async def serve(
        self, lease_id: str, served: run_pb2.OpenEpisodeResponse, wait_s: float
    ) -> coordinator_pb2.ServeEpisodeResponse:
        """Announce a served episode, and wait up to `wait_s` for the end of its application. Repeatable."""
        ...


class Coordinator(Protocol):
    """The coordinator's methods for workers."""

    async def acquire(self, num_max: int, wait_s: float) -> coordinator_pb2.AcquireRolloutsResponse: ...

    async def renew(self, lease_ids: Sequence[str]) -> coordinator_pb2.RenewLeasesResponse: ...

    async def report(self, reports: Sequence[coordinator_pb2.EpisodeReport]) -> Sequence[str]:
        """Return one result per report: empty if recorded, else the reason for the rejection."""
        ...
