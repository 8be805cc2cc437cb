"""A RunService for the learner's tests: one run, honest about leases, epochs, commits and roll-backs; plus a real
depot.

It decides as the contract says, independently of the coordinator, and keeps what it saw. `faults` makes verbs fail:
before they are carried out (`refuse`) or after (`lose_reply`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from rollmesh.services.weights.config import DepotConfig
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.codec.metadata import sample_meta
from rollmesh.shared.codec.trajectory import encode_episode, encode_rewards, encode_sample
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.domain.trajectory import Episode, EpisodeKey, Reward, Role, Sample, SamplingParams, Segment, Source
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import (
    CommitConflict,
    DigestMismatch,
    Fenced,
    LeaseExpired,
    MeshError,
    NotPublished,
    NotUploaded,
    RunEnded,
    Unavailable,
    UnknownLease,
    VersionConflict,
    WrongUpdate,
    WrongVersion,
)
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc, types_pb2

ACCESS = Access(token="token")
LIMIT_S = 60.0
"""Limit of a wait, in seconds; busy hosts need more than a moment."""


def episode(group: str, index: int, *, steps: tuple[int, ...] = (0,), reward: float = 0.0) -> Episode:
    """A prompt and one action segment per step, 6 tokens each, one sample `<group>.<index>` over all of it."""
    draws = np.random.default_rng([ord(c) for c in group] + [index])
    segments = [
        Segment(
            parent=-1, role=Role.CONTEXT, source=Source.PROMPT, token_ids=draws.integers(13, 60, 8).astype(np.int32)
        )
    ]
    for step in steps:
        tokens = draws.integers(13, 60, 6).astype(np.int32)
        segments.append(
            Segment(
                parent=len(segments) - 1,
                role=Role.ACTION,
                source=Source.POLICY,
                token_ids=tokens,
                logprobs=draws.normal(-4.0, 0.1, 6).astype(np.float32),
                loss_mask=np.ones(6, np.uint8),
                version=PolicyVersion(policy="main", step=step),
                kv_step_oldest=step,
                sampling=0,
            )
        )
    sample = Sample(
        sample_id=f"{group}.{index}", leaf=len(segments) - 1, rewards=(Reward(name="correct", value=reward),)
    )
    return Episode(
        key=EpisodeKey(run="r", task=f"task-{group}", group=group, episode=f"{group}.{index}"),
        segments=tuple(segments),
        sampling_params=(SamplingParams(temperature=0.8),),
        samples=(sample,),
    )


@dataclass
class Faults:
    """What goes wrong next, by verb."""

    refuse: dict[str, list[MeshError]] = field(default_factory=lambda: defaultdict(list))
    lose_reply: Counter[str] = field(default_factory=Counter)
    unreadable: set[str] = field(default_factory=set)
    """Samples whose payload is malformed."""
    wrong_digest: bool = False


@dataclass
class Batch:
    lease_id: str
    update: int
    epoch: int
    groups: list[str]
    expires_s: float
    in_doubt: bool = False


@dataclass
class Commit:
    request: bytes
    digest: str
    used: list[str]
    dropped: dict[str, str]
    outcome: int
    groups: list[str]


class World(run_pb2_grpc.RunServiceServicer):
    """The state of the run. Everything is public: tests look."""

    def __init__(
        self, *, clock: Clock, updates_max: int, lease_s: float, batch_groups: int, publish_every: int
    ) -> None:
        self.clock = clock
        self.faults = Faults()
        self.spec = events_pb2.RunSpec(
            run="r",
            max_staleness=2,
            batch_groups=batch_groups,
            group_size=2,
            publish_every=publish_every,
            updates_max=updates_max,
            batch_lease_s=lease_s,
        )
        self.weights_address = ""
        self.weights_moved_to = ""
        """Where the depot is said to be after the attach; empty: where it was."""
        self.blob: Callable[[str], Path] = Path
        self.epoch = 0
        self.incarnation = 0
        self.ready: list[str] = []
        self.episodes: dict[str, list[Episode]] = {}
        self.batch: Batch | None = None
        self.commits: dict[int, Commit] = {}
        self.checkpoint = 0
        self.published: dict[tuple[int, int], str] = {}
        self.calls: Counter[str] = Counter()
        self.resolutions: list[str] = []
        self.commands: asyncio.Queue[int] = asyncio.Queue()
        self.may_publish = asyncio.Event()
        """Whether PublishVersion proceeds."""
        self.may_publish.set()
        self.uploaded: list[str] = []
        """Owners of the blobs that the depot received as bytes, which are manifests on one host."""
        self.commit_waits_for_upload = False
        """Whether a commit waits until the depot has the manifest of its version."""
        self.make: Callable[[str, int], Episode] = lambda g, i: episode(g, i, steps=(self.step,), reward=float(i % 2))
        self.mask_below_step = 0
        self.restamp: dict[str, int] = {}
        """Sample id -> step that its payload is stamped with, whatever its metadata says."""
        self.refuse_steps: dict[int, str] = {}
        """Steps that no node can serve, with the cause, which WatchRun reports to the learner."""
        self.stalled: Callable[[], bool] = lambda: False
        """Whether there is no batch."""
        self.ahead = False
        """Whether PrefetchSamples sends the groups of the next batch. They are made then, so tests fix their stamps."""
        self._changed = asyncio.Condition()

    @property
    def step(self) -> int:
        """The applied step."""
        return max(self.commits, default=0)

    @property
    def digest(self) -> str:
        return self.commits[self.step].digest if self.commits else ""

    def trained(self) -> list[str]:
        """Every sample in the history of the present weights."""
        return [sample for k in sorted(self.commits) for sample in self.commits[k].used]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition()` holds; looked at after every call."""
        async with asyncio.timeout(LIMIT_S), self._changed:
            await self._changed.wait_for(condition)

    async def stored(self, owner: str) -> None:
        """Note an upload."""
        self.uploaded.append(owner)
        async with self._changed:
            self._changed.notify_all()

    async def called(self, verb: str, times: int) -> None:
        """Returns once `verb` has been called so often."""
        await self.until(lambda: self.calls[verb] >= times)

    async def _around(self, verb: str, act: Callable[[], Any]) -> Any:
        self.calls[verb] += 1
        try:
            if self.faults.refuse[verb]:
                raise self.faults.refuse[verb].pop(0)
            reply = act()
            if self.faults.lose_reply[verb] > 0:
                self.faults.lose_reply[verb] -= 1
                raise Unavailable("the reply is lost")
            return reply
        finally:
            async with self._changed:
                self._changed.notify_all()

    # Attach -----------------------------------------------------------------------------------------------------------

    async def AttachTrainer(self, request: run_pb2.AttachTrainerRequest, context: Any) -> run_pb2.AttachTrainerResponse:
        reply: run_pb2.AttachTrainerResponse = await self._around("AttachTrainer", lambda: self._attach(request))
        return reply

    def _attach(self, request: run_pb2.AttachTrainerRequest) -> run_pb2.AttachTrainerResponse:
        last, applied = request.last_update, self.step
        known = self.commits[last].digest if last in self.commits else ""
        if last > applied or known != request.digest:
            raise DigestMismatch(f"update {last} with {request.digest[:8]!r}, the ledger says {known[:8]!r}")
        self.epoch += 1
        if self.batch is not None:
            self.ready[:0] = self.batch.groups
            self.batch = None
        resolution = "CONTINUED"
        if last < applied:
            resolution = "ROLLED_BACK"
            self.incarnation += 1
            undone = [g for k in range(last + 1, applied + 1) for g in self.commits.pop(k).groups]
            self.ready[:0] = undone
        self.checkpoint = max(min(self.checkpoint, last), last)
        self.resolutions.append(resolution)
        return run_pb2.AttachTrainerResponse(
            trainer_epoch=self.epoch,
            next_update=last + 1,
            incarnation=self.incarnation,
            resolution=run_pb2.AttachResolution.Value(f"ATTACH_RESOLUTION_{resolution}"),
            lease_s=self.spec.batch_lease_s,
            weights_address=self.weights_address,
            spec=self.spec,
        )

    def _check_epoch(self, request: Any) -> None:
        if request.trainer_epoch != self.epoch:
            raise Fenced(f"epoch {request.trainer_epoch} is fenced by {self.epoch}")

    # Batches ----------------------------------------------------------------------------------------------------------

    async def LeaseBatch(self, request: run_pb2.LeaseBatchRequest, context: Any) -> run_pb2.LeaseBatchResponse:
        reply: run_pb2.LeaseBatchResponse = await self._around("LeaseBatch", lambda: self._lease(request))
        return reply

    def _lease(self, request: run_pb2.LeaseBatchRequest) -> run_pb2.LeaseBatchResponse:
        self._check_epoch(request)
        if self.step >= self.spec.updates_max:
            raise RunEnded("the run has ended")
        if request.update != self.step + 1:
            raise WrongUpdate(f"the next one is {self.step + 1}")
        if not any(incarnation == self.incarnation for _, incarnation in self.published):
            raise NotPublished("publish first")
        if self.stalled():
            return run_pb2.LeaseBatchResponse(waiting_for="READY groups: 0")
        if self.batch is None:
            groups = [self._next_group() for _ in range(self.spec.batch_groups)]
            lease_id = f"b{self.epoch}.{request.update}.{self.calls['LeaseBatch']}"
            expires_s = self.clock.monotonic_s() + self.spec.batch_lease_s
            self.batch = Batch(lease_id, request.update, self.epoch, groups, expires_s)
        self._held(self.batch.lease_id)
        return self._describe(self.batch)

    def _next_group(self) -> str:
        if not self.ready:
            self._make_group()
        return self.ready.pop(0)

    def _make_group(self) -> None:
        name = f"g{len(self.episodes)}"
        self.episodes[name] = [self.make(name, i) for i in range(self.spec.group_size)]
        self.ready.append(name)

    def _describe(self, batch: Batch) -> run_pb2.LeaseBatchResponse:
        reply = run_pb2.LeaseBatchResponse(lease_id=batch.lease_id, lease_s=self.spec.batch_lease_s)
        for group in batch.groups:
            context = reply.groups.add(group=group, task=f"task-{group}")
            for made in self.episodes[group]:
                for sample in made.samples:
                    rewards = encode_rewards(sample.rewards)
                    context.members.add(sample_id=sample.sample_id, rewards=rewards, end="ready")
                    leased = reply.samples.add(group=group, task=f"task-{group}", mask_below_step=self.mask_below_step)
                    leased.meta.CopyFrom(sample_meta(encode_episode(made), encode_sample(sample)))
        return reply

    def _held(self, lease_id: str) -> Batch:
        if self.batch is None or self.batch.lease_id != lease_id:
            raise UnknownLease(f"no lease {lease_id}")
        if self.clock.monotonic_s() >= self.batch.expires_s:
            self.batch.in_doubt = True
        if self.batch.in_doubt:
            raise LeaseExpired(f"lease {lease_id} has expired")
        return self.batch

    async def FetchSamples(
        self, request: run_pb2.FetchSamplesRequest, context: Any
    ) -> AsyncIterator[run_pb2.FetchSamplesResponse]:
        batch: Batch = await self._around("FetchSamples", lambda: self._held(request.lease_id))
        made = [e for group in batch.groups for e in self.episodes[group]]
        for one in reversed(made):  # the order of payloads is not part of the contract
            message = encode_episode(one)
            ids = [s.sample_id for s in one.samples]
            if request.sample_ids and not set(ids) & set(request.sample_ids):
                continue
            if self.faults.unreadable & set(ids):
                message.segments[1].logprobs_model = b"\1"
            if ids[0] in self.restamp:
                message.segments[1].version.step = self.restamp[ids[0]]
            yield run_pb2.FetchSamplesResponse(episode=message, sample_ids=ids)

    async def PrefetchSamples(
        self, request: run_pb2.PrefetchSamplesRequest, context: Any
    ) -> AsyncIterator[run_pb2.PrefetchSamplesResponse]:
        await self._around("PrefetchSamples", lambda: self._check_epoch(request))
        sent: set[str] = set()
        while True:
            while self.ahead and len(self.ready) < self.spec.batch_groups:
                self._make_group()
            for group in [group for group in self.ready if group not in sent]:
                sent.add(group)
                for made in self.episodes[group]:
                    message, ids = encode_episode(made), [s.sample_id for s in made.samples]
                    if ids[0] in self.restamp:
                        message.segments[1].version.step = self.restamp[ids[0]]
                    yield run_pb2.PrefetchSamplesResponse(episode=message, sample_ids=ids)
            async with self._changed:
                await self._changed.wait()

    async def RenewBatch(self, request: run_pb2.RenewBatchRequest, context: Any) -> run_pb2.RenewBatchResponse:
        reply: run_pb2.RenewBatchResponse = await self._around("RenewBatch", lambda: self._renew(request))
        return reply

    def _renew(self, request: run_pb2.RenewBatchRequest) -> run_pb2.RenewBatchResponse:
        self._check_epoch(request)
        self._held(request.lease_id).expires_s = self.clock.monotonic_s() + self.spec.batch_lease_s
        return run_pb2.RenewBatchResponse(lease_s=self.spec.batch_lease_s)

    async def ReleaseBatch(self, request: run_pb2.ReleaseBatchRequest, context: Any) -> run_pb2.ReleaseBatchResponse:
        reply: run_pb2.ReleaseBatchResponse = await self._around("ReleaseBatch", lambda: self._release(request))
        return reply

    def _release(self, request: run_pb2.ReleaseBatchRequest) -> run_pb2.ReleaseBatchResponse:
        self._check_epoch(request)
        self.ready[:0] = self._held(request.lease_id).groups
        self.batch = None
        return run_pb2.ReleaseBatchResponse()

    # Commits, checkpoints, versions -----------------------------------------------------------------------------------

    async def CommitUpdate(self, request: run_pb2.CommitUpdateRequest, context: Any) -> run_pb2.CommitUpdateResponse:
        if self.commit_waits_for_upload:
            owner = f"weights:r/main@{request.update}.{self.incarnation}"
            await self.until(lambda: owner in self.uploaded)
        reply: run_pb2.CommitUpdateResponse = await self._around("CommitUpdate", lambda: self._commit(request))
        return reply

    def _commit(self, request: run_pb2.CommitUpdateRequest) -> run_pb2.CommitUpdateResponse:
        self._check_epoch(request)
        asked = request.SerializeToString(deterministic=True)
        before = self.commits.get(request.update)
        if before is None:
            before = self.commits[request.update] = self._new_commit(request, asked)
        elif before.request != asked:
            raise CommitConflict(f"update {request.update} was committed otherwise")
        digest = "0" * 64 if self.faults.wrong_digest else before.digest
        return run_pb2.CommitUpdateResponse(digest=digest, ledger_position=100 + request.update)

    def _new_commit(self, request: run_pb2.CommitUpdateRequest, asked: bytes) -> Commit:
        if request.update != self.step + 1:
            raise WrongUpdate(f"the next one is {self.step + 1}")
        batch = self._held(request.lease_ids[0])
        leased = {s.sample_id for g in batch.groups for e in self.episodes[g] for s in e.samples}
        assert {d.sample_id for d in request.samples} == leased, "not one disposition per leased sample"
        dropped = {
            d.sample_id: d.reason for d in request.samples if d.disposition == run_pb2.SAMPLE_DISPOSITION_DROPPED
        }
        skipped = request.outcome == run_pb2.UPDATE_OUTCOME_SKIPPED
        used = [] if skipped else sorted(leased - set(dropped))
        digest = next_digest(self.digest, request.update, used)
        self.batch = None
        return Commit(asked, digest, used, dropped, request.outcome, batch.groups)

    async def ReportCheckpoint(
        self, request: run_pb2.ReportCheckpointRequest, context: Any
    ) -> run_pb2.ReportCheckpointResponse:
        def act() -> run_pb2.ReportCheckpointResponse:
            self._check_epoch(request)
            if self.commits[request.update].digest != request.digest:
                raise DigestMismatch(f"update {request.update}")
            self.checkpoint = max(self.checkpoint, request.update)
            return run_pb2.ReportCheckpointResponse()

        reply: run_pb2.ReportCheckpointResponse = await self._around("ReportCheckpoint", act)
        return reply

    async def PublishVersion(
        self, request: run_pb2.PublishVersionRequest, context: Any
    ) -> run_pb2.PublishVersionResponse:
        await self.may_publish.wait()
        reply: run_pb2.PublishVersionResponse = await self._around("PublishVersion", lambda: self._publish(request))
        return reply

    def _publish(self, request: run_pb2.PublishVersionRequest) -> run_pb2.PublishVersionResponse:
        self._check_epoch(request)
        version: types_pb2.PolicyVersion = request.version
        if (version.step, version.incarnation) != (self.step, self.incarnation):
            raise WrongVersion(f"the present one is {self.step}.{self.incarnation}")
        manifest = self.blob(version.weights_digest)
        if not manifest.exists():
            raise NotUploaded("no manifest")
        for file in parse_manifest(manifest.read_bytes()).files:
            if not all(self.blob(chunk.digest).exists() for chunk in file.chunks):
                raise NotUploaded("no chunk")
        known = self.published.setdefault((version.step, version.incarnation), version.weights_digest)
        if known != version.weights_digest:
            raise VersionConflict(f"{version.step} was published as {known[:8]}")
        if version.step in self.refuse_steps:
            self.commands.put_nowait(run_pb2.TRAINER_COMMAND_UNSPECIFIED)
        return run_pb2.PublishVersionResponse()

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse(state=run_pb2.RunState(weights_address=self.weights_moved_to))

    async def WatchRun(self, request: run_pb2.WatchRunRequest, context: Any) -> AsyncIterator[run_pb2.WatchRunResponse]:
        yield run_pb2.WatchRunResponse()
        while True:
            command = run_pb2.TrainerCommand.ValueType(await self.commands.get())
            yield run_pb2.WatchRunResponse(command=command, state=self._state())

    def _state(self) -> run_pb2.RunState:
        refused = {
            f"main@{step}.{incarnation}": self.refuse_steps[step]
            for step, incarnation in self.published
            if step in self.refuse_steps
        }
        return run_pb2.RunState(policies=[run_pb2.PolicyState(policy="main", refused=refused)])


class RunningWorld:
    """A world behind a real server, with a real depot."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock | None = None,
        updates_max: int = 5,
        lease_s: float = 30.0,
        batch_groups: int = 2,
        publish_every: int = 1,
    ) -> None:
        self.world = World(  # type: ignore[abstract]  # verbs that a trainer never calls stay as generated
            clock=clock or SystemClock(),
            updates_max=updates_max,
            lease_s=lease_s,
            batch_groups=batch_groups,
            publish_every=publish_every,
        )
        config = DepotConfig(directory=str(folder / "depot"), versions_max=1000)  # tests look at old ones
        self._depot = DepotNode(config, node_id="depot", access=ACCESS)
        self._server = RpcServer(access=ACCESS)
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        return self._server.address

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._depot)
        await self._stack.enter_async_context(self._server)
        self.world.weights_address = self._depot.address
        self.world.blob = lambda digest: self._depot.store.directory / digest
        put = self._depot.store.put

        async def watched(*args: Any, owner: str) -> bool:
            existed = await put(*args, owner=owner)
            await self.world.stored(owner)
            return existed

        setattr(self._depot.store, "put", watched)  # noqa: B010 - mypy knows it as a method
        self._server.add(run_pb2_grpc.add_RunServiceServicer_to_server, self.world)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)
        await self._stack.aclose()
