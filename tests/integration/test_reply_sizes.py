"""Replies of the coordinator fit into a message: nothing is granted whose reply could not be sent."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from rollmesh.shared.errors import PayloadTooLarge
from rollmesh.v1 import run_pb2, types_pb2

from .coordinator_mesh import MeshParts, coordinator_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path_factory.mktemp("mesh")) as parts:
        yield parts


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(shared_mesh: MeshParts) -> MeshParts:
    """The shared mesh, about a run of the test's own."""
    return await shared_mesh.another_run(f"sizes-{next(_numbers)}")


def _reward(name: str, **values: str) -> types_pb2.Reward:
    ok = types_pb2.REWARD_OUTCOME_OK
    return types_pb2.Reward(name=name, value=1.0, segment=-1, outcome=ok, **values)


async def _generate(mesh: MeshParts, num: int, reward: Callable[[str], types_pb2.Reward], num_rewards: int) -> None:
    for lease in await mesh.acquire(num):
        report = await mesh.finished(lease, step=0)
        for number in range(num_rewards):
            report.samples[0].rewards.append(reward(f"r{number}"))
        assert await mesh.report([report]) == [""]


async def test_the_evidence_of_rewards_is_not_in_a_lease(mesh: MeshParts) -> None:
    """1,100 rewards with evidence of 4,096 characters, sent twice, have more than 8 MiB."""
    await mesh.begin()
    await _generate(mesh, 4, lambda name: _reward(name, evidence="e" * 4096), 280)
    batch = await mesh.lease(1)
    assert len(batch.samples) == 4
    rewards = [reward for sample in batch.samples for reward in sample.meta.rewards]
    rewards += [r for group in batch.groups for member in group.members for r in member.rewards]
    assert len(rewards) == 2 * 4 * 281
    assert not any(reward.evidence for reward in rewards)
    assert (await mesh.fetch(batch.lease_id))[0].episode.samples


async def test_a_batch_that_does_not_fit_into_a_message_is_refused_and_not_leased(mesh: MeshParts) -> None:
    await mesh.begin(group_size=4)
    await _generate(mesh, 8, lambda name: _reward(name + "-" * 59, scorer="s" * 256, answer="a" * 256), 1020)
    refused = r"the metadata of the batch of update 1 has \d{7,} bytes \(8 samples in 2 groups\), expected at most"
    for _ in range(2):
        with pytest.raises(PayloadTooLarge, match=refused) as caught:
            await mesh.lease(1)
        for setting in ("run.batch_groups", "run.group_size", "message_bytes_max"):
            assert setting in caught.value.message
        assert not caught.value.retryable
    state = await mesh.state()
    assert state.leases.batches_leased == 0
    assert state.policies[0].groups["ready"] == 2
    smaller = run_pb2.BatchGeometry(unit=run_pb2.BatchGeometry.UNIT_GROUPS, amount=1)
    batch = await mesh.lease(1, geometry=smaller)
    assert len(batch.samples) == 4
    await mesh.commit(1, [batch.lease_id])
