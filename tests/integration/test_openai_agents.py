"""Programs with the public `openai` package on a rollout node over real gRPC and a real nats-server; the model is a
script."""

from __future__ import annotations

import sys
from pathlib import Path

from rollmesh.services.rollout.config import RolloutConfig, StagesConfig
from rollmesh.services.rollout.node import RolloutNode
from rollmesh.shared.codec.trajectory import episode_from_bytes
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import ClientChains, Role, Source

from .test_rollout_node import ACCESS, COMPLETED, Mesh, calc_lease, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent"


async def test_the_example_runs_on_a_node_and_its_samples_are_the_engines_tokens(tmp_path: Path) -> None:
    config = RolloutConfig(
        agent=Extension("program", {"command": [sys.executable, "agent.py"]}), stages=StagesConfig(run_max=2)
    )
    async with Mesh(tmp_path) as mesh:
        mesh.coordinator.leases = [calc_lease(number) for number in range(3)]
        node = RolloutNode(
            config,
            node_id="rollout-0",
            coordinator=mesh.address,
            access=ACCESS,
            bus=mesh.bus,
            base_dir=EXAMPLE,
            tokenizer=mesh.tokenizer,
        )
        async with node:
            await until(lambda: len(mesh.coordinator.reports) == 3)
        for report in mesh.coordinator.reports:
            assert report.outcome == COMPLETED, report.failure
            episode = episode_from_bytes((await mesh.samples.read(report.payload.sequence)).payload)
            roles = [segment.role for segment in episode.segments]
            assert roles == [Role.CONTEXT, *[Role.ACTION, Role.OBSERVATION] * 2, Role.ACTION]
            assert [segment.parent for segment in episode.segments] == [-1, 0, 1, 2, 3, 4]
            said = [mesh.tokenizer.decode(s.token_ids) for s in episode.segments if s.source is Source.POLICY]
            assert said[0] == "<tool_call>12*7</tool_call><|end|>"
            assert said[-1] == "<answer>54</answer><|end|>"
            assert episode.samples[0].rewards[0].value == 1.0
            assert episode.chains == ClientChains(begun={"first": 1}, continued=2)
