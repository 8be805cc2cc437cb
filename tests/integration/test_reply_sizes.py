"""Replies of the coordinator fit into a message: nothing is granted whose reply could not be sent."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from msgspec import structs

from rollmesh.mesh.config import BATCH_SAMPLES_MAX
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.errors import PayloadTooLarge
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

from .coordinator_mesh import CONFIG, MIB, MeshParts, coordinator_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshParts]:
    config = structs.replace(CONFIG, streams=StreamLimits(ledger_bytes_max=64 * MIB, dead_bytes_max=16 * MIB))
    async with coordinator_mesh(tmp_path_factory.mktemp("mesh"), config) as parts:
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
        rewards = [reward(f"r{number}") for number in range(num_rewards)]
        report = await mesh.finished(lease, step=0, more_rewards=rewards)
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


@pytest.mark.slow
async def test_samples_that_are_ready_are_streamed_in_parts_and_prefetched(mesh: MeshParts) -> None:
    """Their metadata exceed a message. A lease of a part of them does not."""
    await mesh.begin(group_size=4, batch_groups=4)
    reward = lambda name: _reward(name + "-" * 59, scorer="s" * 256, answer="a" * 256)
    await _generate(mesh, 16, reward, 1020)
    found = await mesh.prefetch(16)
    assert len({sample for response in found for sample in response.sample_ids}) == 16


async def test_dead_letters_are_listed_in_parts_that_fit_into_a_message(mesh: MeshParts) -> None:
    await mesh.begin()
    dead = await mesh.bus.open(run_streams(mesh.name).dead.name)
    letter = events_pb2.DeadLetter(kind=events_pb2.DEAD_KIND_TASK, subject="e", traceback="x" * 900_000)
    for number in range(12):
        await dead.append(letter.SerializeToString(), msg_id=f"dead-{number}")
    found: list[int] = []
    sizes: list[int] = []
    while True:
        request = run_pb2.ListDeadRequest(run=mesh.name, after=found[-1] if found else 0)
        page = (await mesh.call(mesh.run.ListDead, request)).letters
        if not page:
            break
        found += [listed.letter.dead_id for listed in page]
        sizes.append(len(page))
    assert found == list(range(1, 13))
    assert sizes == [4, 4, 4]


async def test_a_sample_takes_at_least_the_bytes_by_which_configurations_are_checked(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(4), step=0)
    batch = await mesh.lease(1)
    assert batch.ByteSize() // len(batch.samples) >= MESSAGE_BYTES_MAX // BATCH_SAMPLES_MAX
