"""The learner over real gRPC, with a real depot and the fake trainer: what it does to the history of a run."""

from __future__ import annotations

import asyncio
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.client import RunAddress
from rollmesh.client.trainer import Trainer
from rollmesh.services.learner.config import LearnerConfig, LearnerRetryConfig, PublishConfig
from rollmesh.services.learner.engine import Restored, StepResult, TrainerEngine, find_engine
from rollmesh.services.learner.fault_points import LearnerFaultPoint
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.services.learner.node import LearnerNode
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, GroupContext, TrainingSample
from rollmesh.shared.errors import (
    ConfigError,
    DataLoss,
    DigestMismatch,
    Fenced,
    LeaseExpired,
    NotUploaded,
    PayloadLost,
    Unauthenticated,
    Unavailable,
    VersionConflict,
    VersionRefused,
)
from rollmesh.shared.process.fault_points import Hook
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.weights.digests import sha256_hex
from rollmesh.shared.weights.manifest import parse_manifest
from rollmesh.testing.fake_trainer import FakeTrainer
from rollmesh.trainer.checkpoint_files import list_checkpoints
from rollmesh.trainer.trained_log import read_trained
from rollmesh.v1 import run_pb2

from .learner_world import ACCESS, LIMIT_S, RunningWorld, World, episode

QUICK = LearnerRetryConfig(retry_s=5.0, backoff_s=0.001, backoff_s_max=0.01)


class Killed(Exception):
    """The learner ends here, as if its process did."""


def config(folder: Path, **changes: Any) -> LearnerConfig:
    base = LearnerConfig(
        directory=str(folder / "learner"), engine=Extension("fake"), checkpoint_every=2, tensorboard=False, retry=QUICK
    )
    return msgspec.structs.replace(base, **changes)


def learner(world: RunningWorld, settings: LearnerConfig, **kwargs: Any) -> LearnerNode:
    where = RunAddress(address=world.address, access=kwargs.pop("access", ACCESS), run="r", holder="test")
    return LearnerNode(settings, where, **kwargs)


async def train(world: RunningWorld, settings: LearnerConfig, **kwargs: Any) -> LearnerNode:
    async with learner(world, settings, **kwargs) as node, asyncio.timeout(LIMIT_S):
        await node.wait()
    return node


def killer(moment: LearnerFaultPoint, world: World, *, update: int) -> Hook:
    """Kills at the first `moment` at which `update` is the newest one committed."""

    async def at(now: LearnerFaultPoint) -> None:
        if now is moment and world.step == update:
            raise Killed

    return at


async def train_and_die(
    world: RunningWorld, settings: LearnerConfig, moment: LearnerFaultPoint, *, update: int
) -> None:
    with pytest.raises(Killed):
        await train(world, settings, at=killer(moment, world.world, update=update))


def weights(world: World, version: tuple[int, int]) -> list[str]:
    """Chunk digests of a published version."""
    manifest = parse_manifest(world.blob(world.published[version]).read_bytes())
    return [chunk.digest for file in manifest.files for chunk in file.chunks]


def check_once(world: World, settings: LearnerConfig) -> None:
    """The newest checkpoint, the ledger, the trainer's own list and the metrics have one history, with no sample in it
    twice."""
    newest = list_checkpoints(settings.checkpoints)[-1]
    lines = list(read_trained(newest / "trained.jsonl"))
    assert [line.sample_ids for line in lines] == [world.commits[k].used for k in sorted(world.commits)]
    assert lines[-1].digest == world.digest
    assert len(world.trained()) == len(set(world.trained()))
    assert world.checkpoint == world.step == lines[-1].update
    reported = read_metrics(settings.checkpoints.parent / "metrics.jsonl").values()
    assert [(r.update, r.incarnation) for r in reported] == [(line.update, line.incarnation) for line in lines]


@asynccontextmanager
async def straight_weights(folder: Path, **kwargs: Any) -> AsyncIterator[list[str]]:
    """The last weights of the same run without any trouble."""
    async with RunningWorld(folder / "straight", **kwargs) as running:
        await train(running, config(folder / "straight"))
        yield weights(running.world, (running.world.step, 0))


# The ordinary life ----------------------------------------------------------------------------------------------------


async def test_learner_trains_to_the_end_and_leaves_the_last_update_in_a_checkpoint_and_published(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path)
    async with RunningWorld(tmp_path) as running:
        node = await train(running, settings)
        assert running.world.step == 5
        assert sorted(running.world.published) == [(k, 0) for k in range(6)]
        assert running.world.calls["ReportCheckpoint"] == 3  # 2, 4 and the last
        check_once(running.world, settings)
    assert (node.progress.update, node.progress.checkpoint_update, node.progress.published_step) == (5, 5, 5)
    lines = read_metrics(Path(settings.directory) / "metrics.jsonl")
    assert [lines[k].metrics["samples/used"] for k in range(1, 6)] == [4.0] * 5
    assert all(line.seconds["train"] > 0 for line in lines.values())


async def test_moments_come_in_the_fixed_order(tmp_path: Path) -> None:
    seen: list[str] = []

    async def at(moment: LearnerFaultPoint) -> None:
        seen.append(moment)

    async with RunningWorld(tmp_path, updates_max=2) as running:
        await train(running, config(tmp_path), at=at)
    # A version is announced at any time between its copy and the next commit, or the end.
    assert seen[1] == "published"
    first, second = (i for i, moment in enumerate(seen) if moment == "committed")
    assert [seen[a:b].count("published") for a, b in ((2, first), (first, second), (second, len(seen)))] == [0, 1, 1]
    update = ["leased", "mid_fetch", "stepped", "committed"]
    rest = [moment for moment in seen if moment != "published"]
    assert rest == ["copied", *update, "copied", *update, "mid_checkpoint", "checkpointed", "copied"]


async def test_a_version_is_uploaded_and_announced_while_the_next_batch_is_trained(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path, updates_max=3) as running:
        world, unpublished = running.world, []

        async def at(moment: LearnerFaultPoint) -> None:
            if moment is LearnerFaultPoint.COPIED and world.step > 0:
                world.may_publish.clear()
            if moment is LearnerFaultPoint.STEPPED:
                unpublished.append((world.step, 0) not in world.published)
                world.may_publish.set()
            if moment is LearnerFaultPoint.COPIED and world.step == 3:
                world.may_publish.set()

        await train(running, config(tmp_path), at=at)
        assert unpublished == [False, True, True], "the next batch was trained before the version was announced"
        assert sorted(world.published) == [(k, 0) for k in range(4)]
        check_once(world, config(tmp_path))


async def test_a_version_is_uploaded_while_its_update_is_committed_and_announced_after_it(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path, updates_max=2) as running:
        world, announced = running.world, list[int]()
        world.commit_waits_for_upload = True

        async def at(moment: LearnerFaultPoint) -> None:
            if moment is LearnerFaultPoint.COMMITTED:
                announced.append(world.calls["PublishVersion"])

        await train(running, config(tmp_path), at=at)
        assert announced == [1, 2], "neither the first version nor the second was announced at its commit"
        assert sorted(world.published) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("checkpoint_every", [1, 100])
async def test_a_version_whose_commit_fails_is_not_announced(tmp_path: Path, checkpoint_every: int) -> None:
    """The one before it is published again, from the manifest that is still stored."""
    settings = config(tmp_path, checkpoint_every=checkpoint_every)
    folder = Path(settings.directory) / "publishing"
    async with straight_weights(tmp_path) as expected, RunningWorld(tmp_path) as running:
        world, refused, kept = running.world, False, list[str]()
        world.commit_waits_for_upload = True

        async def at(moment: LearnerFaultPoint) -> None:
            nonlocal refused
            if moment is LearnerFaultPoint.STEPPED and world.step == 2 and not refused:
                refused = True
                world.faults.refuse["CommitUpdate"] = [LeaseExpired("too late")]
            elif moment is LearnerFaultPoint.COPIED and refused and not kept:
                assert (3, 0) not in world.published
                kept.extend(path.name for path in folder.glob("step-*.manifest"))

        await train(running, settings, at=at)
        assert world.uploaded.count("weights:r/main@3.0") == (2 if checkpoint_every == 1 else 1)
        assert [key for key in world.published if key[0] == 3] == [(3, world.incarnation)]
        assert "step-00000002.0.manifest" in kept, "the version before is published again from it"
        assert not (folder / "files").exists()
        check_once(world, settings)
        assert weights(world, (5, world.incarnation)) == expected


async def test_versions_are_published_as_seldom_as_the_run_says_and_at_the_end(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path, publish_every=3, updates_max=5) as running:
        await train(running, config(tmp_path))
        assert sorted(running.world.published) == [(0, 0), (3, 0), (5, 0)]


async def test_publishing_too_seldom_for_the_bound_is_refused(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path) as running:
        with pytest.raises(ConfigError, match=r"must be <= max_staleness \+ 1 = 3, got 4"):
            await train(running, config(tmp_path, publish=PublishConfig(publish_every=4)))


async def test_data_snapshot_of_the_commit_s_ledger_position_is_in_the_checkpoint(tmp_path: Path) -> None:
    async def snapshot(position: int) -> bytes:
        return b"data at %d" % position

    settings = config(tmp_path)
    async with RunningWorld(tmp_path, updates_max=2) as running:
        await train(running, settings, data_snapshot=snapshot)
    assert (list_checkpoints(settings.checkpoints)[-1] / "data_snapshot.bin").read_bytes() == b"data at 102"


async def test_sources_that_were_admitted_since_the_start_of_the_learner_are_trained(tmp_path: Path) -> None:
    """Another process changed `run.external_sources`, and the learner attaches with the configuration that it has."""
    opened: list[tuple[str, ...]] = []
    engines: list[weakref.ref[TrainerEngine]] = []

    def opener(settings: LearnerConfig) -> Restored:
        if len(opened) == 1:
            assert engines[0]() is None, "two models do not fit into the memory of a device"
        opened.append(settings.external_sources)
        restored = FakeTrainer.open(settings)
        engines.append(weakref.ref(restored.engine))
        return restored

    async with RunningWorld(tmp_path, updates_max=1) as running:
        running.world.spec.external_sources.extend(["dataset", "hint"])
        await train(running, config(tmp_path), open_engine=opener)
        assert opened == [(), ("hint", "dataset")]
        await train(running, config(tmp_path, external_sources=("dataset", "hint")), open_engine=opener)
    assert opened[2:] == [("dataset", "hint")]


async def test_a_checkpoint_that_is_lost_while_the_trainer_is_opened_again_is_rolled_back(tmp_path: Path) -> None:
    """The attach named the lost checkpoint. The older weights must not be published as those of its update."""
    num_opened = 0

    def opener(settings: LearnerConfig) -> Restored:
        nonlocal num_opened
        num_opened += 1
        if num_opened == 2:
            shutil.rmtree(list_checkpoints(settings.checkpoints)[-1])
        return FakeTrainer.open(settings)

    async with RunningWorld(tmp_path, updates_max=4) as running:
        await train_and_die(running, config(tmp_path), LearnerFaultPoint.CHECKPOINTED, update=2)
        running.world.spec.external_sources.append("dataset")
        settings = config(tmp_path)
        await train(running, settings, open_engine=opener)
        assert running.world.incarnation == 1
        check_once(running.world, settings)


async def test_an_attach_whose_session_does_not_begin_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Trainer] = []
    close = Trainer.close

    async def counted(trainer: Trainer) -> None:
        closed.append(trainer)
        await close(trainer)

    num_opened = 0

    def opener(settings: LearnerConfig) -> Restored:
        nonlocal num_opened
        num_opened += 1
        if num_opened == 2:
            raise Unavailable("the model cannot be loaded now")
        return FakeTrainer.open(settings)

    monkeypatch.setattr(Trainer, "close", counted)
    async with RunningWorld(tmp_path, updates_max=1) as running:
        running.world.spec.external_sources.append("dataset")
        node = await train(running, config(tmp_path), open_engine=opener)
    assert len(closed) == 2, "the attach before the failure, and the session that trained"
    assert closed[0] is not closed[1]
    assert num_opened == 4
    assert node.progress.num_attached == 1, "the first attach did not become a session"


async def test_stop_command_ends_with_a_checkpoint_though_none_is_due(tmp_path: Path) -> None:
    settings = config(tmp_path, checkpoint_every=100)
    async with RunningWorld(tmp_path, updates_max=1000) as running:
        async with learner(running, settings) as node, asyncio.timeout(LIMIT_S):
            await running.world.until(lambda: running.world.step >= 3)
            running.world.commands.put_nowait(run_pb2.TRAINER_COMMAND_STOP)
            await node.wait()
        assert 3 <= running.world.step < 1000
        check_once(running.world, settings)


async def test_checkpoint_command_writes_one_and_training_goes_on(tmp_path: Path) -> None:
    settings = config(tmp_path, checkpoint_every=1000)
    async with RunningWorld(tmp_path, updates_max=1000) as running, learner(running, settings) as node:
        running.world.commands.put_nowait(run_pb2.TRAINER_COMMAND_CHECKPOINT)
        await running.world.until(lambda: running.world.checkpoint > 0)
        done = running.world.step
        await running.world.until(lambda: running.world.step > done)
        async with asyncio.timeout(LIMIT_S):
            await node.stop()
        check_once(running.world, settings)


async def test_wrong_token_stops_the_learner_at_once(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path) as running:
        with pytest.raises(Unauthenticated):
            await train(running, config(tmp_path), access=Access(token="wrong"))


# Crashes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", list(LearnerFaultPoint))
async def test_a_learner_killed_at_any_moment_goes_on_as_if_it_had_not_been(
    tmp_path: Path, moment: LearnerFaultPoint
) -> None:
    settings = config(tmp_path)
    async with straight_weights(tmp_path) as expected, RunningWorld(tmp_path) as running:
        update = 4 if moment in (LearnerFaultPoint.MID_CHECKPOINT, LearnerFaultPoint.CHECKPOINTED) else 3
        await train_and_die(running, settings, moment, update=update)
        await train(running, settings)
        world = running.world
        check_once(world, settings)
        assert weights(world, (5, world.incarnation)) == expected


@pytest.mark.parametrize("moment", list(LearnerFaultPoint))
async def test_a_learner_killed_while_payloads_are_loaded_ahead_goes_on_as_if_it_had_not_been(
    tmp_path: Path, moment: LearnerFaultPoint
) -> None:
    def stamped(group: str, index: int) -> Episode:
        return episode(group, index, reward=float(index % 2))

    settings = config(tmp_path)
    async with RunningWorld(tmp_path / "straight") as running:
        running.world.make = stamped
        await train(running, config(tmp_path / "straight", prefetch_bytes_max=0))
        assert running.world.calls["PrefetchSamples"] == 0
        expected = weights(running.world, (5, 0))
    async with RunningWorld(tmp_path) as running:
        world = running.world
        world.make, world.ahead = stamped, True
        update = 4 if moment in (LearnerFaultPoint.MID_CHECKPOINT, LearnerFaultPoint.CHECKPOINTED) else 3
        await train_and_die(running, settings, moment, update=update)
        await train(running, settings)
        assert world.calls["PrefetchSamples"] == 2
        check_once(world, settings)
        assert weights(world, (5, world.incarnation)) == expected


@pytest.mark.parametrize("checkpoint_every", [1, 2])
async def test_a_learner_killed_with_the_next_update_in_memory_and_a_version_half_published_goes_on(
    tmp_path: Path, checkpoint_every: int
) -> None:
    settings = config(tmp_path, checkpoint_every=checkpoint_every)
    async with straight_weights(tmp_path) as expected, RunningWorld(tmp_path) as running:
        world = running.world

        async def at(moment: LearnerFaultPoint) -> None:
            if moment is LearnerFaultPoint.COPIED and world.step == 3:
                world.may_publish.clear()
            if moment is LearnerFaultPoint.STEPPED and world.step == 3:
                raise Killed

        with pytest.raises(Killed):
            await train(running, settings, at=at)
        assert (3, 0) not in world.published
        world.may_publish.set()
        await train(running, settings)
        assert world.resolutions == ["CONTINUED", "CONTINUED" if checkpoint_every == 1 else "ROLLED_BACK"]
        check_once(world, settings)
        assert weights(world, (5, world.incarnation)) == expected


async def test_a_failed_publication_ends_the_wait_for_a_batch_that_needs_it(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path) as running:
        world = running.world
        world.stalled = lambda: (1, 0) not in world.published and world.step == 1

        async def at(moment: LearnerFaultPoint) -> None:
            if moment is LearnerFaultPoint.COPIED and world.step == 1:
                world.faults.refuse["PublishVersion"] = [VersionConflict("published with other bytes")]

        with pytest.raises(VersionConflict):
            await train(running, config(tmp_path), at=at)
        assert world.step == 1


async def test_a_crash_before_the_commit_goes_on_within_the_incarnation_one_after_it_does_not(tmp_path: Path) -> None:
    settings = config(tmp_path)
    async with RunningWorld(tmp_path) as running:
        await train_and_die(running, settings, LearnerFaultPoint.STEPPED, update=2)
        await train_and_die(running, settings, LearnerFaultPoint.COMMITTED, update=3)
        await train(running, settings)
        assert running.world.resolutions == ["CONTINUED", "CONTINUED", "ROLLED_BACK"]
        assert (2, 1) in running.world.published, "the restored weights are published again"


async def test_a_version_published_again_after_a_restart_has_the_same_digest(tmp_path: Path) -> None:
    """Step 0 goes out before there are samples to probe with, and again when there are."""
    settings = config(tmp_path, engine=Extension("fake", {"vocab_size": 60}))
    async with RunningWorld(tmp_path) as running:
        await train_and_die(running, settings, LearnerFaultPoint.STEPPED, update=0)
        assert (Path(settings.directory) / "publishing" / "probes.json").exists()
        await train_and_die(running, settings, LearnerFaultPoint.STEPPED, update=2)
        await train(running, settings)
        world = running.world
        assert world.resolutions == ["CONTINUED"] * 3
        probes = [parse_manifest(world.blob(world.published[k, 0]).read_bytes()).probes for k in range(6)]
    assert all(len(found) > 0 for found in probes)
    assert {p.token_ids for p in probes[0]} != {p.token_ids for p in probes[1]}
    assert {p.token_ids for p in probes[1]} == {p.token_ids for p in probes[5]}
    assert {p.logprobs for p in probes[1]} != {p.logprobs for p in probes[5]}


async def test_the_manifest_of_a_version_is_stored_before_its_announcement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored while the version is uploaded. A learner that is killed after the announcement finds it."""
    settings, stored = config(tmp_path), []
    async with RunningWorld(tmp_path) as running:
        publish = running.world._publish

        def look(request: run_pb2.PublishVersionRequest) -> run_pb2.PublishVersionResponse:
            files = list((Path(settings.directory) / "publishing").glob("step-*.manifest"))
            assert any(sha256_hex(file.read_bytes()) == request.version.weights_digest for file in files)
            stored.append(request.version.step)
            return publish(request)

        monkeypatch.setattr(running.world, "_publish", look)
        await train(running, settings)
        assert stored == sorted(step for step, _ in running.world.published)


# A mesh in trouble ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["AttachTrainer", "LeaseBatch", "CommitUpdate", "ReportCheckpoint", "PublishVersion"])
async def test_a_lost_reply_changes_nothing(tmp_path: Path, verb: str) -> None:
    settings = config(tmp_path)
    async with straight_weights(tmp_path) as expected, RunningWorld(tmp_path) as running:
        running.world.faults.lose_reply[verb] = 2
        await train(running, settings)
        assert running.world.incarnation == 0
        check_once(running.world, settings)
        assert weights(running.world, (5, 0)) == expected


@pytest.mark.parametrize("verb", ["AttachTrainer", "LeaseBatch", "FetchSamples", "CommitUpdate", "PublishVersion"])
async def test_a_gateway_that_is_away_for_a_while_is_asked_again(tmp_path: Path, verb: str) -> None:
    async with RunningWorld(tmp_path) as running:
        running.world.faults.refuse[verb] = [Unavailable("away") for _ in range(4)]
        node = await train(running, config(tmp_path))
        assert (running.world.step, node.progress.num_attached) == (5, 1)


async def test_a_fenced_learner_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    settings = config(tmp_path)
    async with RunningWorld(tmp_path) as running:
        world = running.world
        fenced = False

        async def at(moment: LearnerFaultPoint) -> None:
            nonlocal fenced
            if moment is LearnerFaultPoint.STEPPED and world.step == 3 and not fenced:
                fenced = True
                world._attach(run_pb2.AttachTrainerRequest(last_update=3, digest=world.digest))

        node = await train(running, settings, at=at)
        assert node.progress.last_error.startswith("FENCED")
        assert world.resolutions == ["CONTINUED", "CONTINUED", "ROLLED_BACK"]
        check_once(world, settings)


async def test_a_learner_that_is_always_fenced_gives_up(tmp_path: Path) -> None:
    settings = config(tmp_path, retry=msgspec.structs.replace(QUICK, restarts_max=3))
    async with RunningWorld(tmp_path) as running:
        running.world.faults.refuse["LeaseBatch"] = [Fenced("another one") for _ in range(99)]
        with pytest.raises(Fenced):
            await train(running, settings)
        assert running.world.calls["AttachTrainer"] == 4


async def test_another_digest_at_the_coordinator_is_final(tmp_path: Path) -> None:
    settings = config(tmp_path)
    async with RunningWorld(tmp_path) as running:
        running.world.faults.wrong_digest = True
        with pytest.raises(DigestMismatch, match="disagree on which samples"):
            await train(running, settings)
    assert list_checkpoints(settings.checkpoints) == [], "nothing of a disputed history is made durable"


async def test_a_depot_that_lost_the_upload_gets_it_again(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path) as running:
        running.world.faults.refuse["PublishVersion"] = [NotUploaded("where is it?")]
        await train(running, config(tmp_path))
        running.world.faults.refuse["PublishVersion"] = [NotUploaded("where is it?") for _ in range(3)]
        with pytest.raises(NotUploaded):
            await train(running, config(tmp_path))


async def test_a_depot_that_moved_after_the_attach_is_found_again(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path) as running:
        running.world.weights_moved_to, running.world.weights_address = running.world.weights_address, "127.0.0.1:9"
        node = await train(running, config(tmp_path))
    assert node.progress.published_step == 5


async def test_a_batch_with_a_lost_payload_is_released_and_leased_again(tmp_path: Path) -> None:
    settings = config(tmp_path, prefetch_bytes_max=0)
    async with RunningWorld(tmp_path) as running:
        running.world.faults.refuse["FetchSamples"] = [PayloadLost("gone")]
        node = await train(running, settings)
        assert (running.world.calls["ReleaseBatch"], node.progress.num_attached) == (1, 1)
        running.world.spec.updates_max = 6
        running.world.faults.refuse["FetchSamples"] = [PayloadLost("gone") for _ in range(99)]
        with pytest.raises(DataLoss):
            await train(running, settings)


async def test_an_unreadable_payload_costs_its_own_sample_only(tmp_path: Path) -> None:
    settings = config(tmp_path)
    async with RunningWorld(tmp_path) as running:
        running.world.faults.unreadable = {"g0.1"}
        await train(running, settings)
        assert running.world.commits[1].dropped == {"g0.1": "UNREADABLE"}
        assert running.world.commits[1].used == ["g0.0", "g1.0", "g1.1"]
        check_once(running.world, settings)
    assert read_metrics(Path(settings.directory) / "metrics.jsonl")[1].metrics["dropped/UNREADABLE"] == 1.0


async def test_a_payload_that_contradicts_its_metadata_is_dropped_with_its_own_reason(tmp_path: Path) -> None:
    settings = config(tmp_path)
    async with RunningWorld(tmp_path) as running:
        running.world.restamp = {"g0.1": 7}
        await train(running, settings)
        assert running.world.commits[1].dropped == {"g0.1": "METADATA_MISMATCH"}
    metrics = read_metrics(Path(settings.directory) / "metrics.jsonl")[1].metrics
    assert metrics["dropped/METADATA_MISMATCH"] == 1.0
    assert "dropped/UNREADABLE" not in metrics


async def test_a_non_finite_update_is_committed_as_skipped_and_leaves_the_weights(tmp_path: Path) -> None:
    settings = config(tmp_path, engine=Extension("fake", {"non_finite_updates": [3]}))
    async with RunningWorld(tmp_path) as running:
        await train(running, settings)
        world = running.world
        commit = world.commits[3]
        assert (commit.outcome, commit.used) == (run_pb2.UPDATE_OUTCOME_SKIPPED, [])
        assert set(commit.dropped.values()) == {"NON_FINITE"}
        assert weights(world, (3, 0)) == weights(world, (2, 0)) != weights(world, (4, 0))
        check_once(world, settings)


async def test_tokens_below_the_mask_lose_their_loss(tmp_path: Path) -> None:
    settings = config(tmp_path)
    async with RunningWorld(tmp_path, updates_max=1) as running:
        running.world.make = lambda group, index: episode(group, index, steps=(0, 1, 2))
        running.world.mask_below_step = 2
        await train(running, settings)
    assert read_metrics(Path(settings.directory) / "metrics.jsonl")[1].metrics["tokens/trained"] == 4 * 6


# Leases that run out --------------------------------------------------------------------------------------------------


class SlowTrainer:
    """A fake trainer whose first update takes until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, settings: LearnerConfig) -> Restored:
        restored = find_engine(Extension("fake"))(settings)
        engine = restored.engine
        assert isinstance(engine, FakeTrainer)
        update = engine.update

        def slowly(k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
            self._loop.call_soon_threadsafe(self.asked.set)
            assert self.go.wait(20)
            return update(k, samples, groups)

        engine.update = slowly  # type: ignore[method-assign]
        return restored


class WatchedClock(ManualClock):
    """A manual clock that reports when a task sleeps on it."""

    def __init__(self) -> None:
        super().__init__()
        self._slept = asyncio.Event()

    async def sleep(self, duration_s: float) -> None:
        asyncio.get_running_loop().call_soon(self._slept.set)
        await super().sleep(duration_s)

    async def has_sleeper(self) -> None:
        """While an update is computed, only the renewal sleeps."""
        async with asyncio.timeout(LIMIT_S):
            while not self.num_sleepers():
                self._slept.clear()
                await self._slept.wait()


async def test_the_lease_is_renewed_while_an_update_takes_many_terms(tmp_path: Path) -> None:
    clock, slow = WatchedClock(), SlowTrainer()
    async with RunningWorld(tmp_path, clock=clock, lease_s=30.0, updates_max=1) as running:
        async with learner(running, config(tmp_path), clock=clock, open_engine=slow) as node, asyncio.timeout(LIMIT_S):
            await slow.asked.wait()
            for renewals in range(1, 13):
                await clock.has_sleeper()
                clock.advance(10.0)
                await running.world.called("RenewBatch", renewals)
            slow.go.set()
            await node.wait()
        assert clock.monotonic_s() == 120.0
        assert (running.world.step, running.world.resolutions) == (1, ["CONTINUED"])


async def test_an_update_whose_lease_expired_is_not_committed_but_made_again(tmp_path: Path) -> None:
    clock, slow = WatchedClock(), SlowTrainer()
    settings = config(tmp_path)
    async with RunningWorld(tmp_path, clock=clock, lease_s=30.0, updates_max=1) as running:
        async with learner(running, settings, clock=clock, open_engine=slow) as node, asyncio.timeout(LIMIT_S):
            await slow.asked.wait()
            await clock.has_sleeper()
            clock.advance(31.0)
            await running.world.called("RenewBatch", 1)
            slow.go.set()
            while node.progress.num_attached < 2:
                await clock.has_sleeper()
                clock.advance(0.02)
            await node.wait()
        assert node.progress.last_error.startswith("LEASE_EXPIRED")
        assert running.world.resolutions == ["CONTINUED", "CONTINUED"]
        check_once(running.world, settings)


async def test_leaving_in_mid_update_waits_for_the_computation_and_commits_nothing(tmp_path: Path) -> None:
    slow = SlowTrainer()
    async with RunningWorld(tmp_path) as running:
        async with learner(running, config(tmp_path), open_engine=slow):
            await slow.asked.wait()
            asyncio.get_running_loop().call_later(0.01, slow.go.set)
        assert not [t for t in threading.enumerate() if t.name.startswith("learner-compute")]
        assert running.world.calls["CommitUpdate"] == 0


async def test_learner_whose_versions_are_refused_in_a_row_stops_with_their_cause(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path, updates_max=50) as running:
        world = running.world
        world.refuse_steps = {step: f"probe differs at {step}" for step in (2, 3, 4)}
        world.stalled = lambda: world.step >= 4  # nothing is generated without weights that nodes accept
        with pytest.raises(
            VersionRefused, match=r"main@4.0, the last of 3 consecutive ones: probe differs at 4.*resume"
        ) as caught:
            await train(running, config(tmp_path, quarantined_max=2))
        assert caught.value.metadata == {"version": "main@4.0"}


async def test_learner_goes_on_past_a_refused_version_that_the_bound_allows(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path, updates_max=5) as running:
        running.world.refuse_steps = {2: "probe differs", 4: "probe differs"}
        node = await train(running, config(tmp_path, quarantined_max=1))
    assert node.progress.update == 5
    assert node.progress.num_attached == 1


async def test_without_staleness_the_first_refused_version_ends_the_learner(tmp_path: Path) -> None:
    async with RunningWorld(tmp_path, updates_max=50) as running:
        world = running.world
        world.spec.max_staleness = 0
        world.refuse_steps = {1: "NaN"}
        world.stalled = lambda: world.step >= 1
        with pytest.raises(VersionRefused, match="main@1.0, the last of 1 consecutive ones: NaN"):
            await train(running, config(tmp_path, quarantined_max=2))
