"""What an episode needs from the rest of the mesh: generation, sandboxes, scores, the sample stream, the coordinator.

Each port is as narrow as its use here; `node` fits the mesh's clients to them, tests fit small in-process fakes.
All of them raise `rollmesh.shared.errors.MeshError` for whatever is not the model's doing, and leave nothing behind when the
awaiting task is cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from rollmesh.shared.clients.sandbox import ExecResult
from rollmesh.shared.trajectory import EpisodeKey, FinishReason, FloatArray, IntArray, Reward, SamplingParams
from rollmesh.shared.versions import PolicyVersion
from rollmesh.v1 import coordinator_pb2, reward_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which weights may act: `step` or newer of `incarnation` or newer; exactly those if `exact`."""

    policy: str
    step: int
    incarnation: int
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Sampled tokens of one version. Arrays are [n], as in `rollmesh.shared.trajectory.Segment`."""

    token_ids: IntArray
    logprobs: FloatArray
    logprobs_model: FloatArray | None
    version: PolicyVersion
    kv_step_oldest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One continuation: one span per version that sampled a part of it, in order."""

    spans: tuple[Span, ...]
    finish: FinishReason


class Generator(Protocol):
    """The fleet of inference nodes behind a router."""

    async def generate(
        self, token_ids: IntArray, params: SamplingParams, *, target: Target, session: str, key: EpisodeKey
    ) -> Generated:
        """Continues the prefix `token_ids` [n]. Cancelling the awaiting task ends the request at the engine."""
        ...


class SandboxSession(Protocol):
    """An open session."""

    async def call(self, function: str, *arguments: str, wall_s: float = 0.0) -> ExecResult: ...

    async def run(self, code: str, *, wall_s: float = 0.0) -> ExecResult: ...


class Sandbox(Protocol):
    """The pool of sandbox nodes."""

    def session(
        self, profile: str, *, session_id: str, owner: str = "", ttl_s: float = 0.0
    ) -> AbstractAsyncContextManager[SandboxSession]:
        """Opens on entering; ends on leaving, however that comes."""
        ...


class Scorer(Protocol):
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
