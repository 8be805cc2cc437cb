"""Client of the reward service. It batches episodes that finish at about the same time.

An episode waits at most `window_s` for others. An episode that the service rejects permanently (e.g. for an unknown
answer key) must not fail the others, so a rejected batch is halved until the episode is alone. So is a batch that is
larger than a message, and one that loses its connection, perhaps because an episode ends the node. Scoring is
repeatable, so a failed request is retried on another node, up to a limit.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias, TypeVar

import grpc
from msgspec import Meta

from rollmesh.shared.clock import Clock
from rollmesh.shared.codec.trajectory import decode_rewards, decode_use
from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import EndpointUse, Reward
from rollmesh.shared.errors import (
    ConnectionLost,
    InvalidInput,
    MeshError,
    NoNode,
    NotFound,
    PayloadTooLarge,
    ScorerFailed,
)
from rollmesh.shared.net.retry import is_away, pause_after
from rollmesh.shared.rpc.channel import connected_address
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.telemetry.logs import apart
from rollmesh.shared.telemetry.tracing import traceparent
from rollmesh.v1 import reward_pb2, reward_pb2_grpc

ITEMS_MAX = 256
"""Maximum number of episodes in one request, as the protocol specifies."""

T = TypeVar("T")

_Stub: TypeAlias = "reward_pb2_grpc.RewardServiceAsyncStub"
Rewards = list[tuple[Reward, ...]]


class RewardClientConfig(Settings):
    """Limits of the reward client."""

    window_s: NonNegativeFloat = 0.002
    """Maximum wait of an episode for others, seconds. 0 batches only episodes of the same iteration of the event
    loop."""
    batch_max: Annotated[int, Meta(ge=1, le=ITEMS_MAX)] = 64
    """Maximum number of episodes in one request, at most 256. A full batch is sent immediately."""
    inflight_max: PositiveInt = 8
    """Maximum number of concurrent requests; further ones wait."""
    rpc_s_max: PositiveFloat = 60.0
    """Deadline of one request, seconds."""
    tries_max: PositiveInt = 5
    """Maximum number of attempts of one request that a node fails or rejects temporarily, or during which the
    connection to it is lost, over all nodes."""
    wait_s_max: PositiveFloat = 100.0
    """Maximum wait of one request while no node serves it, seconds. It should be lower than
    `rollout.stages.score_s_max`."""
    backoff_s: PositiveFloat = 0.1
    """First back-off between attempts, seconds; doubles."""
    backoff_s_max: PositiveFloat = 2.0
    """Maximum back-off while no node serves, seconds."""


@dataclass(slots=True)
class _PendingItem:
    run: str
    item: reward_pb2.ScoreItem
    answer: asyncio.Future[Rewards]
    company: Sequence[_PendingItem] = ()
    sending: asyncio.Task[None] | None = None
    uses: list[EndpointUse] = field(default_factory=list)

    def leave(self) -> None:
        """Cancel the request if all its callers have been cancelled."""
        if self.sending is not None and all(entry.answer.done() for entry in self.company):
            self.sending.cancel()


class RewardClient:
    """Score at the nodes that `addresses` currently returns, in turn."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        connect: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        config: RewardClientConfig | None = None,
    ) -> None:
        self._addresses = addresses
        self._connect = connect
        self._clock = clock
        self._config = config or RewardClientConfig()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._columns: dict[str, frozenset[str]] = {}
        self._turns = itertools.count()
        self._waiting: list[_PendingItem] = []
        self._places = asyncio.Semaphore(self._config.inflight_max)
        self._window: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._errors: dict[int, str] = {}

    @property
    def waiting_for(self) -> str:
        """Cause of the current retries; empty without retries."""
        if not self._errors:
            return ""
        return f"{len(self._errors)} scoring requests are retried: {next(iter(self._errors.values()))}"

    @property
    def num_pending(self) -> int:
        """Number of queued or running requests."""
        return len(self._sending) + bool(self._waiting)

    async def columns(self) -> Collection[str]:
        """Return the names of the per-token arrays that the scorers read. Each node of a mesh has the same scorers.
        Raise `MeshError`."""
        known = next((self._columns[address] for address in self._addresses() if address in self._columns), None)
        return await self._repeated(self._learn_columns) if known is None else known

    async def _learn_columns(self, address: str, stub: _Stub) -> Collection[str]:
        response = await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=self._config.rpc_s_max)
        self._columns[address] = frozenset(column for scorer in response.scorers for column in scorer.columns)
        return self._columns[address]

    async def score(self, run: str, item: reward_pb2.ScoreItem, uses: list[EndpointUse] | None = None) -> Rewards:
        """Return the rewards of the item's samples, in order. Raise `MeshError`; the rewards contain failures of
        scorers.

        What the scorers asked of endpoints is appended to `uses`.
        """
        item.traceparent = traceparent()
        waiting = _PendingItem(run, item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._waiting) >= self._config.batch_max:
            self._flush()
        elif self._window is None:
            self._window = asyncio.create_task(self._flush_later(), context=apart())
        try:
            rewards = await waiting.answer
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            waiting.leave()
            raise
        if uses is not None:
            uses += waiting.uses
        return rewards

    async def close(self) -> None:
        """Cancel the requests in progress; waiting callers get CancelledError."""
        tasks = [*self._sending, *([self._window] if self._window else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in self._waiting:
            waiting.answer.cancel()
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close(None) for channel in channels))

    # Gathering --------------------------------------------------------------------------------------------------------

    async def _flush_later(self) -> None:
        await self._clock.sleep(self._config.window_s)
        self._window = None
        self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._window is not None:
            self._window.cancel()
            self._window = None
        for run in dict.fromkeys(entry.run for entry in waiting):
            batch = [entry for entry in waiting if entry.run == run]
            task = asyncio.create_task(self._send(run, batch), context=apart())
            for entry in batch:
                entry.company, entry.sending = batch, task
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    # Sending ----------------------------------------------------------------------------------------------------------

    async def _send(self, run: str, batch: list[_PendingItem]) -> None:
        try:
            async with self._places:
                batch = [entry for entry in batch if not entry.answer.done()]  # drops entries cancelled meanwhile
                await self._score_batch(run, batch)
        except asyncio.CancelledError:
            for entry in batch:
                entry.answer.cancel()
            raise

    async def _score_batch(self, run: str, batch: list[_PendingItem]) -> None:
        if not batch:
            return
        try:
            answers = _by_item(await self._ask(run, batch), batch)
        except (ConnectionLost, InvalidInput, NotFound, PayloadTooLarge) as err:
            if len(batch) > 1:
                half = len(batch) // 2
                await self._score_batch(run, batch[:half])
                await self._score_batch(run, batch[half:])
            else:
                _refuse(batch, err)
        except MeshError as err:
            _refuse(batch, err)
        else:
            for entry, answer in zip(batch, answers, strict=True):
                if not entry.answer.done():
                    entry.answer.set_result(answer)

    async def _ask(self, run: str, batch: list[_PendingItem]) -> reward_pb2.RewardServiceScoreResponse:
        request = reward_pb2.RewardServiceScoreRequest(run=run, items=[entry.item for entry in batch])
        return await self._repeated(
            lambda _, stub: stub.Score(request, timeout=self._config.rpc_s_max), can_split=len(batch) > 1
        )

    async def _repeated(self, call: Callable[[str, _Stub], Awaitable[T]], *, can_split: bool = False) -> T:
        """Call a node until it returns, for `wait_s_max` while none serves, and at most `tries_max` times otherwise.

        A lost connection counts as a try, because the request itself may have ended the process of the node. A request
        that the caller can split is not repeated after one, so that the item that is the cause is found.
        """
        end_s = self._clock.monotonic_s() + self._config.wait_s_max
        num_away = num_failed = 0
        while True:
            try:
                address, channel = self._next_node()
                stub: _Stub = reward_pb2_grpc.RewardServiceStub(channel)
                with typed_errors(await connected_address(channel, address)):
                    return await call(address, stub)
            except MeshError as err:
                if is_away(err):
                    num_away += 1
                    pause_s = pause_after(num_away, self._config.backoff_s, self._config.backoff_s_max)
                    if self._clock.monotonic_s() + pause_s > end_s:
                        raise NoNode(f"no reward node served for {self._config.wait_s_max:g} s: {err}") from err
                else:
                    num_failed += 1
                    is_split = can_split and isinstance(err, ConnectionLost)
                    if is_split or not err.retryable or num_failed == self._config.tries_max:
                        raise
                    pause_s = pause_after(num_failed, self._config.backoff_s, self._config.rpc_s_max)
                await self._wait(min(max(pause_s, err.retry_after_s or 0.0), self._config.rpc_s_max), err)

    async def _wait(self, pause_s: float, err: MeshError) -> None:
        self._errors[id(err)] = str(err)
        try:
            await self._clock.sleep(pause_s)
        finally:
            del self._errors[id(err)]

    def _next_node(self) -> tuple[str, grpc.aio.Channel]:
        addresses = sorted(self._addresses())
        if not addresses:
            raise NoNode("no reward node has joined; start one, or wait until it joins")
        address = addresses[next(self._turns) % len(addresses)]
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return address, self._channels[address]


def _refuse(batch: Sequence[_PendingItem], err: MeshError) -> None:
    for entry in batch:
        if not entry.answer.done():
            entry.answer.set_exception(err)


def _by_item(response: reward_pb2.RewardServiceScoreResponse, batch: Sequence[_PendingItem]) -> list[Rewards]:
    """Split the flat response by episode. Raise `ScorerFailed` if it does not contain the requested samples."""
    asked = [sample.sample_id for entry in batch for sample in entry.item.samples]
    if [sample.sample_id for sample in response.samples] != asked:
        raise ScorerFailed("the reward service returned other samples than requested; retry")
    scored = iter(decode_rewards(sample.rewards) for sample in response.samples)
    uses = {one.sample_id: [decode_use(use) for use in one.uses] for one in response.endpoints}
    for entry in batch:
        entry.uses = [use for sample in entry.item.samples for use in uses.get(sample.sample_id, ())]
    return [[next(scored) for _ in entry.item.samples] for entry in batch]
