"""Loads payloads of READY samples in the background, before they are leased.

It only saves the time of a fetch. The lease decides what may be trained, and a payload that is missing here is fetched
then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass

from rollmesh.client.calls import RunCalls
from rollmesh.shared.errors import MeshError
from rollmesh.shared.net.retry import Backoff, worth_retrying
from rollmesh.v1 import run_pb2

LEASES_KEPT = 2
"""Number of leases after which an unused payload is dropped. Its samples have ended, or follow much later."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    message: run_pb2.PrefetchSamplesResponse
    num_bytes: int
    lease: int
    """Number of leases before it arrived."""


class Prefetch:
    """The payloads ahead of one trainer session, from `start` to `close`."""

    def __init__(self, run: RunCalls, *, trainer_epoch: int, bytes_max: int) -> None:
        """Keep at most `bytes_max` bytes of payloads; the oldest are dropped first."""
        self._run = run
        self._request = run_pb2.PrefetchSamplesRequest(**run.names(), trainer_epoch=trainer_epoch)
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._num_leases = 0
        self._kept: dict[tuple[str, ...], _Kept] = {}
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of payloads that are here."""
        return len(self._kept)

    def start(self) -> None:
        """Begin to load. Repeatable."""
        if self._task is None and self._bytes_max > 0:
            self._task = asyncio.create_task(self._load(), name=f"prefetch {self._run.name}")

    async def close(self) -> None:
        """Stop, and drop all payloads."""
        task, self._task = self._task, None
        self._kept.clear()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    def take(self, leased: Collection[str]) -> list[run_pb2.PrefetchSamplesResponse]:
        """Remove and return the payloads with samples in `leased`."""
        names = set(leased)
        taken = [key for key in self._kept if not names.isdisjoint(key)]
        found = [self._drop(key).message for key in taken]
        self._num_leases += 1
        for key in [key for key, kept in self._kept.items() if self._num_leases - kept.lease >= LEASES_KEPT]:
            self._drop(key)
        return found

    async def _load(self) -> None:
        backoff = Backoff(self._run.gateway.config, self._run.gateway.clock)
        while True:
            try:
                async with aclosing(self._run.gateway.stream("PrefetchSamples", self._request)) as messages:
                    async for message in messages:
                        backoff.reset()
                        self._keep(message)
            except MeshError as err:
                if not worth_retrying(err):
                    _log.debug("payloads are not loaded ahead of their lease: cause=%s", err)
                    return
            await backoff.pause()

    def _keep(self, message: run_pb2.PrefetchSamplesResponse) -> None:
        key = tuple(message.sample_ids)
        if key in self._kept:
            self._drop(key)
        kept = self._kept[key] = _Kept(message, message.ByteSize(), self._num_leases)
        self._num_bytes += kept.num_bytes
        while self._num_bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, ...]) -> _Kept:
        kept = self._kept.pop(key)
        self._num_bytes -= kept.num_bytes
        return kept
