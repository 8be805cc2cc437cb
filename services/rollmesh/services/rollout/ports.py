"""What an episode needs from the rest of the mesh: generation, sandboxes, scores, the sample stream, the coordinator.

Each port is as narrow as its use here; `node` fits the mesh's clients to them, tests fit small in-process fakes.
All of them raise `rollmesh.shared.errors.MeshError` for whatever is not the model's doing, and leave nothing behind when the
awaiting task is cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self

from rollmesh.shared.clients.generated import Target
from rollmesh.shared.clients.sandbox import ExecResult, RemoteSnapshot
from rollmesh.shared.trajectory import EpisodeKey, FinishReason, IntArray, Reward, SamplingParams, Segment
from rollmesh.v1 import coordinator_pb2, reward_pb2


class GenerationPort(Protocol):
    """One continuation under way: iterate inside `async with`; leaving it early ends the request at the engine."""

    @property
    def finish(self) -> FinishReason:
        """Why it ended; UNFINISHED before the last piece."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Segment:
        """New tokens of one version, at least one."""
        ...


class Generator(Protocol):
    """The fleet of inference nodes behind a router."""

    def open(
        self, token_ids: IntArray, params: SamplingParams, *, target: Target, session: str, key: EpisodeKey
    ) -> GenerationPort:
        """Continues the prefix `token_ids` [n]."""
        ...


class SandboxSession(Protocol):
    """An open session."""

    async def call(self, function: str, *arguments: str, wall_s: float = 0.0) -> ExecResult: ...

    async def run(
        self, code: str, *, language: str = "python", arguments: Sequence[str] = (), wall_s: float = 0.0
    ) -> ExecResult: ...

    async def snapshot(self, *, ttl_s: float = 0.0) -> RemoteSnapshot: ...


class SandboxPort(Protocol):
    """The pool of sandbox nodes."""

    def session(
        self, profile: str, *, session_id: str, owner: str = "", ttl_s: float = 0.0, tenant: str = ""
    ) -> AbstractAsyncContextManager[SandboxSession]:
        """Opens on entering; ends on leaving, however that comes. Counts against the quota of `tenant`."""
        ...

    def fork(
        self, snapshot: RemoteSnapshot, *, session_id: str, owner: str = "", ttl_s: float = 0.0
    ) -> AbstractAsyncContextManager[SandboxSession]:
        """As `session`, in the state of a snapshot."""
        ...

    async def drop(self, snapshot: RemoteSnapshot) -> None:
        """Forgets a snapshot."""
        ...


class ScoringPort(Protocol):
    """The reward service."""

    async def score(self, run: str, item: reward_pb2.ScoreItem) -> list[tuple[Reward, ...]]:
        """Rewards per sample, in the item's order."""
        ...


class SampleLog(Protocol):
    """The sample stream."""

    async def append(self, run: str, payload: bytes, *, message_id: str) -> int:
        """Stores a payload, returns its sequence. The same `message_id` again, soon after, returns the same sequence."""
        ...


class Coordinator(Protocol):
    """The coordinator's verbs for workers."""

    async def acquire(self, num_max: int, wait_s: float) -> coordinator_pb2.AcquireRolloutsResponse: ...

    async def renew(self, lease_ids: Sequence[str]) -> coordinator_pb2.RenewLeasesResponse: ...

    async def report(self, reports: Sequence[coordinator_pb2.EpisodeReport]) -> Sequence[str]:
        """One result per report: empty if recorded, else a reason."""
        ...
