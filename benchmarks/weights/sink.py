"""A node that fetches versions and has no engine: one process of the fan-out in the bench `weights`.

`python -m benchmarks.weights.sink NAME COORDINATOR FOLDER RATE`, with the token of the mesh as a line of its input. It
joins the coordinator as an inference node, follows its weight commands with the fetcher of such a node, and serves its
chunks to the nodes behind it. It reports a version as prepared when every chunk is stored and hashed. RATE limits its
ingress and its egress, in bytes per second. Each line of its output is a JSON object with an event.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollmesh.shared.codec.trajectory import decode_version
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.process.stop_signals import stop_signals
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.byte_rate import ByteRate
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.shared.weights.fetcher import Fetcher, SourceChannels
from rollmesh.shared.weights.manifest import version_owner
from rollmesh.shared.weights.servicer import BlobServicer
from rollmesh.shared.weights.transfer import TransferConfig
from rollmesh.v1 import coordinator_pb2, weights_pb2, weights_pb2_grpc

QUOTA_BYTES, DELTA_BYTES = 8 << 30, 256 << 20
WeightCommand = coordinator_pb2.WeightCommand
WeightReport = coordinator_pb2.WeightReport


class WeightSink(JoinedNode):
    """An inference node without engine: PREPARE fetches and verifies, ACTIVATE does nothing."""

    kind = coordinator_pb2.NODE_KIND_INFERENCE

    def __init__(self, folder: Path, rate: float, *, node_id: str, coordinator: str, access: Access) -> None:
        super().__init__(node_id=node_id, access=access, coordinator=coordinator)
        self._store = BlobStore(folder, quota_bytes=QUOTA_BYTES, durable=False)
        self._deltas = DeltaCache(self._store, bytes_max=DELTA_BYTES)
        self._egress = ByteRate(rate)
        transfer = TransferConfig(ingress_bytes_per_s=rate, same_host=False)
        self._sources = SourceChannels(lambda address: open_channel(address, access=access))
        self._fetcher = Fetcher(self._store, self._sources, transfer, self._deltas)
        self._prepared: weights_pb2.WeightManifest | None = None
        self._active: weights_pb2.WeightManifest | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def build(self, stack: AsyncExitStack) -> None:
        stack.callback(self._store.close)
        await asyncio.to_thread(self._store.start)
        stack.push_async_callback(self._deltas.close)
        stack.push_async_callback(self._sources.close)
        blobs = BlobServicer(self._store, writable=False, deltas=self._deltas, egress=self._egress)
        self.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, blobs)

    async def end_calls(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def on_weights(self, command: WeightCommand) -> None:
        task = asyncio.create_task(self._execute(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, command: WeightCommand) -> None:
        """An error ends the process, and so the bench."""
        version, phase = decode_version(command.version), WeightReport.PHASE_ACTIVE
        if command.verb == WeightCommand.VERB_PREPARE:
            self.say("begin", step=version.step)
            owner, sources = version_owner(version), list(command.sources)
            self._prepared = await self._fetcher.version(
                version.weights_digest, sources, owner=owner, base=self._active
            )
            self.say("verified", step=version.step)
            phase = WeightReport.PHASE_PREPARED
        else:
            self._active = self._prepared
            self.say("active", step=version.step)
        assert self.membership is not None
        self.membership.report_weights(WeightReport(version=command.version, phase=phase))

    def say(self, event: str, **values: Any) -> None:
        line = {"event": event, "node": self.node_id, "at_s": time.monotonic(), "received": self._fetcher.fetched_bytes}
        print(json.dumps(line | values), flush=True)


async def main() -> None:
    name, coordinator, folder, rate = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
    access = Access(token=sys.stdin.readline().strip())
    sink = WeightSink(folder, rate, node_id=name, coordinator=coordinator, access=access)
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in stop_signals():
        loop.add_signal_handler(signum, stopped.set)
    async with sink:
        assert sink.membership is not None
        await sink.membership.wait_joined()
        sink.say("joined")
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(main())
