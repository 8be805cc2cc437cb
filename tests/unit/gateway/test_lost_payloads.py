"""A payload that is gone: the lease of a rollout may be old, and the next lease would have a replayed sample again."""

from __future__ import annotations

import pytest

from rollmesh.services.gateway.payloads import episode_ref, read_episode
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import PayloadLost
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import run_pb2, types_pb2


async def test_a_payload_that_is_gone_is_a_failure_of_its_replayed_samples_only() -> None:
    log = await MemoryBus().create(run_streams("r").samples)
    sample = run_pb2.LeasedSample(meta=types_pb2.SampleMeta(sample_id="r0.0"), replay_of="g0.0.0")
    read = await read_episode(log, episode_ref(7, [sample]))
    assert isinstance(read.error, PayloadLost)
    sample.ClearField("replay_of")
    with pytest.raises(PayloadLost, match="ReleaseBatch and lease again"):
        await read_episode(log, episode_ref(7, [sample]))
