"""Implement `ports.SampleLog` on the bus: append payloads to the sample streams of runs.

A full stream is back-pressure and a lost server recovers, so an append is retried until `give_up_s` has passed. Its
message id makes the retry safe. Meanwhile the episode keeps its slot, so that a worker with a full stream stops
acquiring work.
"""

from __future__ import annotations

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.services.rollout.failures import retry_call
from rollmesh.shared.bus.bus import Bus, StreamLog
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import Clock


class BusSampleLog:
    """Append payloads to `RM_<run>_SAMPLES`. The coordinator creates the streams with the run."""

    def __init__(self, bus: Bus, config: WorkerConfig, clock: Clock) -> None:
        self._bus = bus
        self._config = config
        self._clock = clock
        self._streams: dict[str, StreamLog] = {}

    async def append(self, run: str, payload: bytes, *, message_id: str) -> int:
        async def once() -> int:
            stream = await self._stream(run)
            return await stream.append(payload, msg_id=message_id, deadline_s=self._config.rpc_s_max)

        return await retry_call(once, self._config, self._clock)

    async def _stream(self, run: str) -> StreamLog:
        if run not in self._streams:
            self._streams[run] = await self._bus.open(run_streams(run).samples.name)
        return self._streams[run]
