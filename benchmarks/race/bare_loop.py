"""Reinforcement learning without a mesh: generate a batch, train on it, swap the weights, in one process and one thread
of control.

Engine, trainer, agent, episode code, scorers and selector are those of the mesh, with the same `MeshConfig`. The
selector gets the results of a batch before the next draw. Everything between the parts is omitted: services, gRPC,
NATS, sandbox jails, leases, ledger, finalizers, batches in doubt, checkpoints. It is a baseline for the mesh and not
meant for use: the first error ends it.

The weights may lag: those of step `max(0, k - 1 - lag)` generate the batch of update k. Evaluations use the newest
weights.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from benchmarks.race.bare_parts import DirectScorer, EngineGenerator, EpisodeList
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.mesh_services import located_learner
from rollmesh.sandbox_runtime.tools import calc
from rollmesh.services.data.config import build_pools, build_selector
from rollmesh.services.data.selector import GroupResult
from rollmesh.services.data.servicer import encode_task
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.inference.engine import KvPolicy, with_model
from rollmesh.services.inference.node import make_engine
from rollmesh.services.learner.engine import ExportedWeights, StepResult
from rollmesh.services.learner.engines.torch_trainer import TorchTrainer
from rollmesh.services.rollout.agent import load_agents
from rollmesh.services.rollout.episode import EpisodeParts, EpisodeRunner
from rollmesh.services.rollout.progress import WorkerProgress
from rollmesh.services.rollout.recorder import mix64
from rollmesh.services.rollout.stages import Stages
from rollmesh.services.rollout.tokenizer import load_tokenizer
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.codec.trajectory import summary_of
from rollmesh.shared.domain.trajectory import (
    WHOLE_SAMPLE,
    Episode,
    GroupContext,
    MemberOutcome,
    Outcome,
    Sample,
    TrainingSample,
)
from rollmesh.shared.domain.versions import PolicyVersion, oldest_admissible, staleness
from rollmesh.testing.rollout import FixedPrivateData, LocalSandbox
from rollmesh.v1 import coordinator_pb2, types_pb2

TRAIN = types_pb2.PURPOSE_TRAIN


class BareLoop:
    """Use: `async with BareLoop(config, model, folder) as loop: await loop.update()`, once per update."""

    def __init__(
        self, config: MeshConfig, model: Path, folder: Path, *, lag: int = 0, base_dir: Path | None = None
    ) -> None:
        """`folder` stores the weights between trainer and engine: those of the last `lag` + 1 steps. A user's files in
        `config` are relative to `base_dir`."""
        self._config = config
        self._folder = folder
        self._lag = lag
        self._base_dir = base_dir = base_dir or Path()
        learner = msgspec.structs.replace(
            located_learner(config, self._base_dir), directory=str(folder), model=str(model), seed=config.run.seed
        )
        self.trainer = TorchTrainer.open(learner).engine
        engine = with_model(config.inference.engine, base_dir, lambda: model)
        self.engine = make_engine(msgspec.structs.replace(config.inference, engine=engine), base_dir)
        self._pools = build_pools(config.data, base_dir)
        seeded = msgspec.structs.replace(config.data, seed=config.data.seed or config.run.seed)
        self._selector = build_selector(seeded, self._pools[Split.TRAIN], base_dir)
        self._exported: dict[int, ExportedWeights] = {}
        self._episodes = EpisodeList()
        self._runner = self._make_runner(model)

    async def __aenter__(self) -> Self:
        await self.engine.start()
        await self._swap()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.engine.close()

    async def update(self) -> StepResult:
        """Generate one batch, make one update, and swap the weights."""
        number = self.trainer.step + 1
        leases = self.leases(number)
        episodes = await self._run(leases)
        labels = {lease.key.group: dict(lease.task.labels) for lease in leases}
        samples, groups = _batch(episodes, number, labels, self._config.rollout.summary_text_chars)
        results = self._observe(groups)
        result = self.trainer.update(number, samples, groups)
        for trained in result.groups:
            self._selector.observe_trained(replace(results[trained.group], trained=trained))
        await self._swap()
        return result

    def _observe(self, groups: list[GroupContext]) -> dict[str, GroupResult]:
        """Report the groups of a batch to the selector, and return their results."""
        pool, reward = self._pools[Split.TRAIN], self._config.data.success_reward or self._config.run.success_reward
        results = {}
        for group in groups:
            found = [
                min(1.0, max(0.0, one.value))
                for member in group.members
                for one in member.rewards
                if one.name == reward and one.segment == WHOLE_SAMPLE and one.outcome is Outcome.OK
            ]
            position = pool.position(group.task)
            assert position is not None
            result = GroupResult(position=position, successes=sum(found), failures=len(found) - sum(found))
            results[group.group] = result
            if found:
                self._selector.observe(result)
        return results

    async def evaluate(self, num_tasks: int, num_samples: int) -> list[Episode]:
        """Run the first `num_tasks` tasks of the test range under the newest weights, `num_samples` times each.

        Every evaluation has the same tasks and the same seeds.
        """
        step, pool = self.trainer.step, self._pools[Split.TEST]
        await self._serve(step)
        leases = [
            self._lease(pool.task(position), position, member, num_samples, types_pb2.PURPOSE_EVAL)
            for position in range(num_tasks)
            for member in range(num_samples)
        ]
        episodes = await self._run(leases)
        await self._serve(self._generating_step())
        return episodes

    async def _run(self, leases: list[coordinator_pb2.EpisodeLease]) -> list[Episode]:
        reports = await asyncio.gather(*(self._runner.run(lease) for lease in leases))
        failed = [report for report in reports if report.outcome != coordinator_pb2.EPISODE_OUTCOME_COMPLETED]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(reports)} episodes failed, first: {failed[0].failure.message}")
        return self._episodes.take()

    def _make_runner(self, model: Path) -> EpisodeRunner:
        config, clock = self._config.rollout, SystemClock()
        return EpisodeRunner(
            EpisodeParts(
                config=config,
                agents=load_agents(config, self._base_dir),
                tokenizer=load_tokenizer(model, config.format),
                generator=EngineGenerator(self.engine, config.outputs, config.num_top),
                sandbox=LocalSandbox({config.tools["calculator"].function: calc.call}),
                scorer=DirectScorer(self._config.reward, self._base_dir),
                data=FixedPrivateData({}),
                samples=self._episodes,
                clock=clock,
                stages=Stages(config.stages, clock),
                progress=WorkerProgress(),
            )
        )

    def leases(self, update: int) -> list[coordinator_pb2.EpisodeLease]:
        """Return the tasks that the mesh would draw for this update."""
        run, pool = self._config.run, self._pools[Split.TRAIN]
        first = (update - 1) * run.batch_groups
        positions: list[int] = []
        for draw in range(first, first + run.batch_groups):
            positions.append(self._selector.draw(draw, frozenset(positions)))
        return [
            self._lease(pool.task(position), draw, member, run.group_size)
            for draw, position in enumerate(positions, first)
            for member in range(run.group_size)
        ]

    def _lease(
        self, task: PoolTask, draw: int, member: int, size: int, purpose: types_pb2.Purpose.ValueType = TRAIN
    ) -> coordinator_pb2.EpisodeLease:
        run, message = self._config.run, encode_task(task)
        group = f"{'g' if purpose == TRAIN else 'e'}{draw:08d}"
        return coordinator_pb2.EpisodeLease(
            lease_id=f"{group}-{member}",
            key=types_pb2.EpisodeKey(
                run=run.name, task=message.task_id, group=group, episode=f"{group}-{member:04d}", attempt=1
            ),
            purpose=purpose,
            task=message,
            policy=run.policy,
            seed=mix64(draw * size + member) >> 1,
            index=member,
        )

    def _generating_step(self) -> int:
        """Return the step whose weights generate the next batch."""
        return oldest_admissible(update=self.trainer.step + 1, eta=self._lag)

    async def _swap(self) -> None:
        """Store the weights of the trainer, load those that generate the next batch into the engine, and delete older
        ones."""
        newest, generating = self.trainer.step, self._generating_step()
        folder = self._folder / f"step{newest}"
        folder.mkdir(exist_ok=True)
        self._exported[newest] = self.trainer.export_weights(folder)
        await self._serve(generating)
        for step in [step for step in self._exported if step < generating]:
            del self._exported[step]
            shutil.rmtree(self._folder / f"step{step}")

    async def _serve(self, step: int) -> None:
        version = PolicyVersion(policy=self._config.run.policy, step=step)
        await self.engine.prepare(version, self._exported[step].files)
        await self.engine.activate(version, KvPolicy.RECOMPUTE)


def _batch(
    episodes: list[Episode], update: int, labels: Mapping[str, dict[str, str]], text_chars: int
) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return all generated samples, in the order of the episodes, and their groups."""
    samples: list[TrainingSample] = []
    members: dict[tuple[str, str], list[MemberOutcome]] = {}
    for episode in episodes:
        for sample in episode.samples:
            group, task = episode.key.group, episode.key.task
            samples.append(training_sample(episode, sample, update))
            members.setdefault((group, task), []).append(_outcome(episode, sample, text_chars))
    groups = [
        GroupContext(group=group, task=task, members=tuple(them), labels=labels[group])
        for (group, task), them in members.items()
    ]
    return samples, groups


def training_sample(episode: Episode, sample: Sample, update: int) -> TrainingSample:
    """Return a sample of an episode as a trainer gets it for an update."""
    oldest = episode.oldest_step(sample)
    return TrainingSample(
        sample=sample,
        segments=episode.path_segments(sample),
        group=episode.key.group,
        task=episode.key.task,
        staleness=None if oldest is None else staleness(update=update, oldest_step=oldest),
        sampling_params=episode.sampling_params,
        episode=episode.key.episode,
        indices=episode.path(sample.leaf),
    )


def _outcome(episode: Episode, sample: Sample, text_chars: int) -> MemberOutcome:
    """Return what a group stores about one of its samples."""
    return MemberOutcome(
        sample_id=sample.sample_id,
        rewards=sample.rewards,
        end="ready",
        episode=episode.key.episode,
        summary=summary_of(episode, sample, text_chars=text_chars),
    )
