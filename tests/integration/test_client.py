"""The thin client: a whole run over a real mesh, and what it does when a verb is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client import Batch, Client, Tensor, Trainer
from rollmesh.client.trainer import NoBatch
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.codec.trajectory import encode_episode
from rollmesh.shared.errors import (
    Fenced,
    InvalidSpec,
    LeaseExpired,
    NotPublished,
    Unauthenticated,
    Unavailable,
    WeightsRejected,
)
from rollmesh.shared.net.retry import RetryConfig
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.v1 import events_pb2, run_pb2

from ..chaos.world import mesh_config, save_model_folder
from .coordinator_mesh import eventually
from .external_trainer_mesh import mesh_without_learner
from .learner_world import ACCESS, RunningWorld, World, episode

WEIGHTS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(2, np.float32)}
QUICK = RetryConfig(retry_s=5.0, backoff_s=0.001, backoff_s_max=0.01)
HEAVY = ("torch", "numpy", "transformers", "nats", "nats_server", "yaml", "typer", "rich", "msgpack")


def test_importing_it_loads_nothing_heavy() -> None:
    code = f"import sys, rollmesh.client; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# A whole run ----------------------------------------------------------------------------------------------------------


def run_spec(**changes: float | str) -> events_pb2.RunSpec:
    values = {
        "run": "thin", "max_staleness": 2, "batch_groups": 2, "group_size": 4, "publish_every": 1, "tries_max": 3,
        "episode_lease_s": 30.0, "batch_lease_s": 60.0, "group_s_max": 60.0, "eval_s_max": 30.0, "updates_max": 4,
    }  # fmt: skip
    return events_pb2.RunSpec(**(values | changes))  # type: ignore[arg-type]


async def test_a_run_from_its_making_to_its_end_over_a_real_mesh(tmp_path: Path) -> None:
    config = mesh_config(save_model_folder(tmp_path / "model"))
    waits: list[str] = []
    async with (
        mesh_without_learner(config, tmp_path / "mesh") as mesh,
        Client(mesh.gateway_address, token=mesh.access.token) as client,
        asyncio.timeout(100),
    ):
        run = await client.create_run(run_spec())
        async with await run.attach(holder="test") as trainer:
            await trainer.publish(WEIGHTS)
            async for batch in trainer.batches(on_wait=waits.append):
                await train_on(trainer, batch)
        state = await run.state()
        assert mesh.nats is not None
        bus = mesh.layout.with_payloads(await JetStreamBus.connect(mesh.nats.url, login=mesh.layout.bus_login()))
        report = await audit_run(bus, "thin")
        await bus.close()
    assert report.holds, report.to_text()
    assert state.ended == "UPDATES_MAX"
    assert state.samples.trained == 4 * 8
    assert state.policies[0].digest == trainer.digest
    assert all(wait.startswith("READY groups:") for wait in waits)


async def train_on(trainer: Trainer, batch: Batch) -> None:
    """What a trainer does with a batch, less the training."""
    assert {sample.leased.group for sample in batch.samples} == {group.group for group in batch.groups}
    # A trainer can tell the samples of one episode apart from those of several.
    episodes = {member.sample_id: member.episode for group in batch.groups for member in group.members}
    assert all(sample_id == f"{episode}-0" for sample_id, episode in episodes.items())
    for sample in batch.samples:
        path = sample.path()
        assert path[0].parent == -1
        assert any(len(s.logprobs) == len(s.token_ids) == 4 * sum(s.loss_mask) for s in path if s.loss_mask)
    await trainer.commit(batch)
    await trainer.report_checkpoint()
    await trainer.publish(WEIGHTS)


async def test_a_spec_that_cannot_work_and_a_wrong_token_are_typed_errors(tmp_path: Path) -> None:
    config = mesh_config(save_model_folder(tmp_path / "model"))
    async with mesh_without_learner(config, tmp_path / "mesh") as mesh:
        async with Client(mesh.gateway_address, token=mesh.access.token) as client:
            with pytest.raises(InvalidSpec, match="group_size"):
                await client.create_run(run_spec(group_size=0))
        async with Client(mesh.gateway_address, token="another") as client:
            with pytest.raises(Unauthenticated):
                await client.run("thin").state()


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningWorld]:
    async with RunningWorld(tmp_path) as world:
        yield world


def client_of(running: RunningWorld) -> Client:
    return Client(running.address, token=ACCESS.token, retry=QUICK)


async def next_batch(trainer: Trainer) -> Batch:
    batch = await trainer.batch(wait_s=5.0)
    assert batch is not None
    return batch


async def test_nothing_is_leased_before_weights_are_published(running: RunningWorld) -> None:
    async with client_of(running) as client, await client.run("r").attach() as trainer:
        with pytest.raises(NotPublished):
            await trainer.batch()
        await trainer.publish(WEIGHTS)
        assert (await next_batch(trainer)).update == 1


async def test_weights_that_are_not_finite_are_not_sent(running: RunningWorld) -> None:
    async with client_of(running) as client, await client.run("r").attach() as trainer:
        bad = Tensor(dtype="bfloat16", shape=[2], data=bytes.fromhex("803f807f"))
        with pytest.raises(WeightsRejected, match="tensor w of main@0.0 has a value that is NaN or infinite"):
            await trainer.publish({"w": bad})
        assert not running.world.published
        await trainer.publish(WEIGHTS)


async def test_dropped_samples_keep_their_reasons(running: RunningWorld) -> None:
    world = running.world
    async with client_of(running) as client, await client.run("r").attach() as trainer:
        await trainer.publish(WEIGHTS)
        batch = await next_batch(trainer)
        name = batch.samples[0].sample_id
        await trainer.commit(batch, dropped={name: "TOO_LONG"})
        assert world.commits[1].dropped == {name: "TOO_LONG"}
        assert len(world.commits[1].used) == len(batch.samples) - 1


async def test_a_payload_that_contradicts_its_metadata_is_dropped_though_the_gateway_sent_it(
    running: RunningWorld,
) -> None:
    world = running.world
    async with client_of(running) as client, await client.run("r").attach() as trainer:
        await trainer.publish(WEIGHTS)
        world.restamp = {"g0.1": 7}
        batch = await next_batch(trainer)
        assert dict(batch.unreadable) == {"g0.1": "METADATA_MISMATCH"}
        await trainer.commit(batch)
    assert world.commits[1].dropped == {"g0.1": "METADATA_MISMATCH"}


async def loaded_ahead(trainer: Trainer, world: World, num: int) -> None:
    """Returns once the trainer has `num` payloads of a batch that it cannot lease yet."""
    world.stalled, world.ahead = lambda: True, True
    assert isinstance(await trainer.lease(wait_s=0.1), str)

    async def loaded() -> bool:
        return trainer.num_ahead >= num

    await eventually(loaded)
    world.stalled = lambda: False


async def test_payloads_that_were_loaded_ahead_are_not_fetched_again(running: RunningWorld) -> None:
    async with client_of(running) as client, await client.run("r").attach(prefetch_bytes_max=1 << 20) as trainer:
        await trainer.publish(WEIGHTS)
        await loaded_ahead(trainer, running.world, 4)
        batch = await next_batch(trainer)
        assert [sample.sample_id for sample in batch.samples] == ["g0.0", "g0.1", "g1.0", "g1.1"]
        assert [len(sample.path()) for sample in batch.samples] == [2] * 4
        await trainer.commit(batch)
    assert running.world.calls["FetchSamples"] == 0


async def test_a_payload_ahead_that_contradicts_the_lease_is_fetched(running: RunningWorld) -> None:
    async with client_of(running) as client, await client.run("r").attach(prefetch_bytes_max=1 << 20) as trainer:
        await trainer.publish(WEIGHTS)
        running.world.restamp = {"g1.0": 1}
        await loaded_ahead(trainer, running.world, 4)
        running.world.restamp = {}
        batch = await next_batch(trainer)
        assert [sample.episode.segments[1].version.step for sample in batch.samples] == [0] * 4
        assert not batch.unreadable
    assert running.world.calls["FetchSamples"] == 1


async def test_payloads_ahead_are_bounded_and_the_rest_is_fetched(running: RunningWorld) -> None:
    one = encode_episode(episode("g0", 0)).ByteSize()
    async with client_of(running) as client, await client.run("r").attach(prefetch_bytes_max=3 * one) as trainer:
        await trainer.publish(WEIGHTS)
        await loaded_ahead(trainer, running.world, 2)
        batch = await next_batch(trainer)
        assert [sample.sample_id for sample in batch.samples] == ["g0.0", "g0.1", "g1.0", "g1.1"]
    assert running.world.calls["FetchSamples"] == 1


async def test_a_lost_reply_does_not_count_twice(running: RunningWorld) -> None:
    world = running.world
    async with client_of(running) as client, await client.run("r").attach() as trainer:
        await trainer.publish(WEIGHTS)
        world.faults.lose_reply.update({"LeaseBatch": 1, "CommitUpdate": 1, "PublishVersion": 1})
        world.faults.refuse["FetchSamples"].append(Unavailable("restarting"))
        committed = await trainer.commit(await next_batch(trainer))
        await trainer.publish(WEIGHTS)
    assert world.calls["CommitUpdate"] == 2
    assert (world.step, world.digest) == (1, committed.digest)


async def test_the_older_of_two_trainers_is_fenced_and_may_not_commit(running: RunningWorld) -> None:
    async with client_of(running) as client:
        run = client.run("r")
        async with await run.attach() as old:
            await old.publish(WEIGHTS)
            batch = await next_batch(old)
            async with await run.attach() as new:
                with pytest.raises(Fenced):
                    await old.commit(batch)
                assert new.attached.trainer_epoch == old.attached.trainer_epoch + 1


async def test_a_batch_that_is_left_uncommitted_is_given_back(running: RunningWorld) -> None:
    world = running.world
    async with client_of(running) as client, await client.run("r").attach() as trainer:
        await trainer.publish(WEIGHTS)
        first = await next_batch(trainer)
        again = await next_batch(trainer)
        assert world.calls["ReleaseBatch"] == 1
        assert again.lease_id != first.lease_id
        assert [s.sample_id for s in again.samples] == [s.sample_id for s in first.samples]
        with pytest.raises(NoBatch):
            await trainer.commit(first)
    assert world.calls["ReleaseBatch"] == 2, "leaving gives back, too"


async def test_a_batch_is_renewed_until_it_is_committed_and_its_loss_shows(tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        RunningWorld(tmp_path, clock=clock, lease_s=30.0) as running,
        Client(running.address, token=ACCESS.token, retry=QUICK, clock=clock) as client,
        await client.run("r").attach() as trainer,
    ):
        world = running.world
        await trainer.publish(WEIGHTS)
        batch = await next_batch(trainer)
        for k in range(1, 8):  # 70 s: two terms and more
            await a_term_passes(clock, world, k)
        trainer.check()
        world.faults.refuse["RenewBatch"].append(LeaseExpired("the coordinator's clock says so"))
        await a_term_passes(clock, world, 8)
        with pytest.raises(LeaseExpired):
            await until_lost(trainer)
        assert (await trainer.commit(batch)).digest, "a commit that is taken outweighs a renewal that was not"


async def a_term_passes(clock: ManualClock, world: World, renewals: int) -> None:
    """A third of one, that is: once the renewal sleeps, and until it has asked so often."""
    async with asyncio.timeout(20):
        while not clock.num_sleepers():  # noqa: ASYNC110 (the clock has no event)
            await asyncio.sleep(0.001)
    clock.advance(10.0)
    await world.called("RenewBatch", renewals)


async def until_lost(trainer: Trainer) -> None:
    async with asyncio.timeout(10):
        while True:
            trainer.check()
            await asyncio.sleep(0)


async def test_a_checkpoint_older_than_the_ledger_rolls_back_and_publishes_a_new_incarnation(
    running: RunningWorld,
) -> None:
    world = running.world
    async with client_of(running) as client:
        run = client.run("r")
        async with await run.attach() as trainer:
            await trainer.publish(WEIGHTS)
            saved = await trainer.commit(await next_batch(trainer))
            await trainer.publish(WEIGHTS)
            await trainer.commit(await next_batch(trainer))
        async with await run.attach(last_update=1, digest=saved.digest) as trainer:
            assert trainer.attached.resolution == "ROLLED_BACK"
            assert (trainer.update, trainer.digest) == (1, saved.digest)
            version = await trainer.publish(WEIGHTS)
            assert (version.step, version.incarnation) == (1, 1)
            assert (await next_batch(trainer)).update == 2
    assert world.resolutions == ["CONTINUED", "ROLLED_BACK"]


# Weights --------------------------------------------------------------------------------------------------------------


async def test_equal_weights_make_one_digest_in_whatever_form_they_come(running: RunningWorld, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    as_bytes = {
        name: Tensor(dtype="float32", shape=values.shape, data=values.tobytes()) for name, values in WEIGHTS.items()
    }
    async with client_of(running) as client, await client.run("r").attach() as trainer:
        first = await trainer.publish(WEIGHTS)
        assert await trainer.publish(dict(reversed(as_bytes.items()))) == first
    manifest = parse_manifest(running.world.blob(first.weights_digest).read_bytes())
    (chunk,) = manifest.files[0].chunks
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(running.world.blob(chunk.digest).read_bytes())
    found = load_file(copy)
    assert found.keys() == WEIGHTS.keys()
    assert all(np.array_equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


async def test_watching_shows_states_and_commands(running: RunningWorld) -> None:
    async with client_of(running) as client, asyncio.timeout(10):
        news = client.run("r").watch()
        await anext(news)
        running.world.commands.put_nowait(run_pb2.TRAINER_COMMAND_STOP)
        assert (await anext(news)).command == run_pb2.TRAINER_COMMAND_STOP
        await news.aclose()
