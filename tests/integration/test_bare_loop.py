"""The baseline of `rollmesh bench mesh_modes`: real engine, trainer and episodes, without a mesh."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollmesh.bench.bare_loop import BareLoop
from rollmesh.bench.mesh_modes_arm import Work, run_config
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import MeshConfig
from rollmesh.services.data.config import build_pools, build_selector
from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.task import Split
from rollmesh.services.reward.config import ScorerConfig
from rollmesh.services.reward.item import ScoreItem
from rollmesh.trainer.config import OptimizerConfig
from rollmesh.trainer.model_files import write_model_folder

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
    config = run_config(Work(mode="bare", eta=0, model=str(model), warm=0, num=1, num_profiled=0))
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
        before = loop.trainer.score(tokens)
        results = [await loop.update() for _ in range(2)]
        after = loop.trainer.score(tokens)
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
