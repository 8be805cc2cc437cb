"""Implement `ports.PrivateData` over gRPC, at the data nodes of the mesh in turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import grpc

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.services.rollout.failures import retry_call
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.extras import ExtraError, decode_extras
from rollmesh.shared.errors import InfraFailure, MeshError, NoNode, Unimplemented
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import data_pb2, data_pb2_grpc


class DataLink:
    """Requests private extras at the nodes that `addresses` currently returns. A failed request is repeated."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        connect: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        config: WorkerConfig,
    ) -> None:
        self._addresses, self._connect, self._clock, self._config = addresses, connect, clock, config
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turns = itertools.count()
        self._errors: dict[object, str] = {}
        """The last error of each request that is repeated."""

    @property
    def waiting_for(self) -> str:
        """Cause of the current retries; empty without retries."""
        if not self._errors:
            return ""
        return f"{len(self._errors)} requests for private extras are retried: {next(iter(self._errors.values()))}"

    async def private_extras(self, *, run: str, split: str, task_id: str, names: Sequence[str]) -> Mapping[str, object]:
        request = data_pb2.GetPrivateExtrasRequest(run=run, split=split, task_id=task_id, names=names)
        asked = object()

        async def ask() -> data_pb2.GetPrivateExtrasResponse:
            try:
                return await self._ask(request)
            except MeshError as err:
                self._errors[asked] = str(err)
                raise

        try:
            response = await retry_call(ask, self._config, self._clock)
        finally:
            self._errors.pop(asked, None)
        try:
            return decode_extras(response.extras)
        except ExtraError as err:
            raise InfraFailure(f"the data service returned a malformed response: {err}") from None

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close(None) for channel in channels))

    async def _ask(self, request: data_pb2.GetPrivateExtrasRequest) -> data_pb2.GetPrivateExtrasResponse:
        addresses = sorted(self._addresses())
        if not addresses:
            raise NoNode("no data node has joined; start one, or wait until it joins")
        first = next(self._turns) % len(addresses)
        for address in addresses[first:] + addresses[:first]:
            channel = self._channels.get(address) or self._channels.setdefault(address, self._connect(address))
            stub: data_pb2_grpc.DataServiceAsyncStub = data_pb2_grpc.DataServiceStub(channel)
            with suppress(Unimplemented), typed_errors():
                return await stub.GetPrivateExtras(request, timeout=self._config.rpc_s_max)
        raise Unimplemented(
            f"the data node {', '.join(addresses)} has protocol 1.0, which has no private extras; upgrade it, or "
            "remove rollout.private_extras"
        )
