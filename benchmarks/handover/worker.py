"""A rollout worker that generates nothing: it leases episodes, stores payloads of a given size, and reports them.

`python -m benchmarks.handover.worker RUN_DIR CONFIG SAMPLE_BYTES`, beside the processes of a run. Leases, payload,
stream and report are real; only the tokens are the same every time.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.services.rollout.coordinator_link import CoordinatorLink
from rollmesh.services.rollout.lease import decode_lease
from rollmesh.services.rollout.sample_log import BusSampleLog
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.codec.metadata import sample_meta
from rollmesh.shared.codec.trajectory import encode_episode, encode_key
from rollmesh.shared.config.loader import load_config
from rollmesh.shared.domain.trajectory import Episode, EpisodeKey, Reward, Role, Sample, SamplingParams, Segment, Source
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.membership.membership import Membership, PassiveHandler
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2, types_pb2

NODE = "bench-worker"
LEASES = 64
"""Episodes per request and per report."""
BYTES_PER_TOKEN = 9
"""Token id, log-prob, loss mask."""


async def work(layout: RunLayout, bus: Bus, num_bytes: int) -> None:
    """Lease, store payloads and report until cancelled."""
    config, clock = WorkerConfig(), SystemClock()
    samples = BusSampleLog(bus, config, clock)
    segment = _segment(max(1, num_bytes // BYTES_PER_TOKEN))
    hello = coordinator_pb2.NodeHello(node_id=NODE, kind=coordinator_pb2.NODE_KIND_ROLLOUT, capacity=LEASES)
    async with (
        Membership(layout.coordinator, access=layout.access, handler=PassiveHandler(hello)) as member,
        open_channel(layout.coordinator, access=layout.access) as channel,
    ):
        await member.wait_joined()
        link = CoordinatorLink(channel, NODE, rpc_s_max=config.rpc_s_max)
        while True:
            leases = (await link.acquire(LEASES, config.acquire_wait_s)).leases
            episodes = [_episode(lease, segment) for lease in leases]
            reports = await asyncio.gather(
                *(_store(lease, episode, samples) for lease, episode in zip(leases, episodes, strict=True))
            )
            if reports:
                await link.report(reports)


def _segment(num_tokens: int) -> Segment:
    rng = np.random.default_rng(0)
    return Segment(
        parent=-1,
        role=Role.ACTION,
        source=Source.POLICY,
        token_ids=rng.integers(0, 1000, num_tokens, dtype=np.int32),
        logprobs=rng.standard_normal(num_tokens).astype(np.float32),
        loss_mask=np.ones(num_tokens, dtype=np.uint8),
        version=PolicyVersion(policy="main", step=0),
        kv_step_oldest=0,
        sampling=0,
    )


def _episode(message: coordinator_pb2.EpisodeLease, segment: Segment) -> Episode:
    """Return a version: the oldest weights that the lease allows."""
    lease = decode_lease(message)
    version = PolicyVersion(policy="main", step=lease.target.step, incarnation=lease.target.incarnation)
    return Episode(
        key=lease.key,
        segments=(replace(segment, version=version, kv_step_oldest=version.step),),
        sampling_params=(SamplingParams(),),
        samples=(_sample(lease.key),),
    )


def _sample(key: EpisodeKey) -> Sample:
    return Sample(sample_id=f"{key.episode}-0", leaf=0, rewards=(Reward(name="correct", value=1.0, scorer="bench@1"),))


async def _store(
    lease: coordinator_pb2.EpisodeLease, episode: Episode, samples: BusSampleLog
) -> coordinator_pb2.EpisodeReport:
    message = encode_episode(episode)
    payload = message.SerializeToString(deterministic=True)
    message_id = f"{episode.key.episode}.{episode.key.attempt}"
    sequence = await samples.append(episode.key.run, payload, message_id=message_id)
    return coordinator_pb2.EpisodeReport(
        lease_id=lease.lease_id,
        key=encode_key(episode.key),
        outcome=coordinator_pb2.EPISODE_OUTCOME_COMPLETED,
        payload=types_pb2.PayloadRef(sequence=sequence, size_bytes=len(payload)),
        samples=[sample_meta(message, sample) for sample in message.samples],
    )


async def main() -> None:
    run_dir, config_file, num_bytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    layout = open_layout(load_config(MeshConfig, config_file), run_dir=run_dir, base_dir=config_file.parent)
    server = layout.bus_server()
    bus = layout.with_payloads(await JetStreamBus.connect(server.known_url(), login=layout.bus_login()))
    try:
        await work(layout, bus, num_bytes)
    finally:
        await bus.close()


if __name__ == "__main__":
    asyncio.run(main())
