"""The baseline of `python -m benchmarks race`: real engine, trainer and episodes, without a mesh."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedModel

from benchmarks.race.bare_loop import BareLoop
from benchmarks.race.work import RaceWork, race_config
from benchmarks.warm_model import CONFIG
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import MeshConfig
from rollmesh.services.data.config import build_pools, build_selector
from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.selector import GroupResult
from rollmesh.services.data.selectors.uniform import UniformSelector
from rollmesh.services.data.task import Split
from rollmesh.services.learner.engine import StepResult
from rollmesh.services.reward.config import ScorerConfig
from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.domain.trajectory import GroupContext, TrainingSample
from rollmesh.trainer.config import OptimizerConfig
from rollmesh.trainer.forward import score
from rollmesh.trainer.model_files import load_model, write_model_folder

GROUPS, SIZE = 2, 4


class Parity:
    """Tells the answers of an untrained model apart: right ones would never come."""

    async def score(self, item: ScoreItem) -> float:
        return float(len(item.response()) % 2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model_folder(build_tiny_model(TinyModelConfig(), seed=1), build_tokenizer(), folder)
    return folder


def small_config(model: Path) -> MeshConfig:
    work = RaceWork(
        mode="bare", config=str(CONFIG), eta=0, filtered=False, seed=3, model=str(model), folder=str(model.parent),
        updates=1, snapshot_every=1, num_profiled=0, limit_s=60.0,
    )  # fmt: skip
    config = race_config(work)
    return msgspec.structs.replace(
        config,
        learner=msgspec.structs.replace(config.learner, optimizer=OptimizerConfig(lr=7e-4)),
        run=msgspec.structs.replace(config.run, batch_groups=GROUPS, group_size=SIZE, seed=3),
        reward=msgspec.structs.replace(
            config.reward, scorers=(ScorerConfig(name=f"{__file__}:Parity", reward="correct"),)
        ),
    )


@pytest.mark.slow
async def test_bare_loop_trains_on_every_episode_and_serves_what_it_trained(tmp_path: Path, model: Path) -> None:
    tokens = np.arange(10, 30, dtype=np.int32)
    async with BareLoop(small_config(model), model, tmp_path) as loop:
        (before,) = loop.trainer.score([tokens])
        results = [await loop.update() for _ in range(2)]
        (after,) = loop.trainer.score([tokens])
        assert loop.engine.active is not None
        assert loop.engine.active.step == 2
        (served,) = await loop.engine.score([tokens])
    assert [result.update for result in results] == [1, 2]
    assert [len(result.verdicts) for result in results] == [GROUPS * SIZE] * 2
    assert all(result.metrics["tokens/trained"] > 0 for result in results)
    np.testing.assert_allclose(served.logprobs, after, atol=1e-4)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.slow
async def test_bare_loop_takes_the_tasks_that_the_data_service_draws(tmp_path: Path, model: Path) -> None:
    config = small_config(model)
    data = msgspec.structs.replace(config.data, seed=config.run.seed)
    pool = build_pools(data)[Split.TRAIN]
    draws = RunDraws(pool=pool, new_selector=lambda pool: build_selector(data, pool))
    wanted = [pool.task(at).task_id for at in draws.positions("main", GROUPS, GROUPS)]
    leases = BareLoop(config, model, tmp_path).leases(2)
    assert [lease.task.task_id for lease in leases] == [task for task in wanted for _ in range(SIZE)]
    assert len({lease.seed for lease in leases}) == GROUPS * SIZE


class Recorder(UniformSelector):
    """Stores the results that it gets."""

    observed: ClassVar[list[GroupResult]] = []
    trained: ClassVar[list[GroupResult]] = []

    def observe(self, result: GroupResult) -> None:
        self.observed.append(result)

    def observe_trained(self, result: GroupResult) -> None:
        self.trained.append(result)


@pytest.mark.slow
async def test_the_selector_gets_every_group_before_the_next_draw(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "benchmarks.race.bare_loop.build_selector", lambda config, pool, base: Recorder(pool=pool, seed=3)
    )
    async with BareLoop(small_config(model), model, tmp_path) as loop:
        drawn = [lease.task.task_id for lease in loop.leases(1)[::SIZE]]
        result = await loop.update()
        pool = build_pools(small_config(model).data)[Split.TRAIN]
    assert [pool.task(one.position).task_id for one in Recorder.observed] == drawn
    assert [one.successes + one.failures for one in Recorder.observed] == [SIZE] * GROUPS
    assert [one.trained for one in Recorder.trained] == list(result.groups)
    assert {one.position for one in Recorder.trained} <= {one.position for one in Recorder.observed}


@pytest.mark.slow
async def test_the_weights_of_lag_updates_ago_generate(tmp_path: Path, model: Path) -> None:
    lag, num = 2, 4
    batches: dict[int, list[TrainingSample]] = {}
    async with BareLoop(small_config(model), model, tmp_path, lag=lag) as loop:
        train = loop.trainer.update

        def update(k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
            batches[k] = list(samples)
            return train(k, samples, groups)

        loop.trainer.update = update  # type: ignore[method-assign]
        models = [load_model(model)]
        for k in range(1, num + 1):
            await loop.update()
            kept = tmp_path / f"kept{k}"
            shutil.copytree(model, kept)
            loop.trainer.export_weights(kept)
            models.append(load_model(kept))
    assert sorted(os.listdir(tmp_path)) == ["kept1", "kept2", "kept3", "kept4", "model", "step2", "step3", "step4"]
    for k, samples in batches.items():
        step = max(0, k - 1 - lag)
        steps = {s.version.step for sample in samples for s in sample.segments if s.version is not None}
        assert steps == {step}
        assert {sample.staleness for sample in samples} == {k - 1 - step}
        errors = [_largest_error(models[other], samples[0]) for other in range(num + 1)]
        assert errors[step] < 1e-4
        assert all(error > 1e-3 for other, error in enumerate(errors) if other != step), errors


def _largest_error(model: PreTrainedModel, sample: TrainingSample) -> float:
    """Return the largest difference between the log-probs of the sampler and those of a model."""
    scores = score(model, np.concatenate([s.token_ids for s in sample.segments]))
    given = np.concatenate([np.zeros(s.num_tokens) if s.logprobs is None else s.logprobs for s in sample.segments])
    sampled = np.concatenate([np.full(s.num_tokens, s.logprobs is not None) for s in sample.segments])
    return float(np.abs(scores - given)[sampled].max())


@pytest.mark.slow
async def test_evaluations_use_the_newest_weights_and_do_not_change_the_run(tmp_path: Path, model: Path) -> None:
    trained = []
    for evaluates in (False, True):
        folder = tmp_path / str(evaluates)
        folder.mkdir()
        async with BareLoop(small_config(model), model, folder, lag=1) as loop:
            for k in (1, 2):
                await loop.update()
                if evaluates:
                    episodes = await loop.evaluate(3, 2)
                    assert len(episodes) == 6
                    assert len({episode.key.task for episode in episodes}) == 3
                    assert {s.version.step for e in episodes for s in e.segments if s.version is not None} == {k}
            trained.append(loop.trainer.score([np.arange(10, 30, dtype=np.int32)])[0])
    np.testing.assert_allclose(
        trained[0], trained[1], atol=1e-5
    )  # equal tokens; log-probs depend on the batch by rounding
