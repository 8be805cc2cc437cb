"""The torch trainer on two ranks: equal results, checkpoints between one and two ranks, and ranks that fail or
disagree."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch.distributed as dist
from safetensors.numpy import load_file
from torch._C._distributed_c10d import HashStore

from rollmesh.client import RunAddress
from rollmesh.demo.tiny_model import build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import Position, Restored
from rollmesh.services.learner.engines import rank_group, torch_trainer
from rollmesh.services.learner.engines.rank_group import RankGroup, join
from rollmesh.services.learner.engines.torch_trainer import TorchTrainer
from rollmesh.services.learner.fault_points import LearnerFaultPoint
from rollmesh.services.learner.node import LearnerNode
from rollmesh.shared.errors import ConfigError, LossFailed, RankFailed, RanksDisagree
from rollmesh.trainer.checkpoint import latest_checkpoint
from rollmesh.trainer.config import (
    ComputeConfig,
    LossTermChoice,
    OptimizerConfig,
    PackingConfig,
    ReferenceConfig,
    UpdateConfig,
)
from rollmesh.trainer.model_files import WEIGHTS_NAME, load_model, write_model_folder
from rollmesh.trainer.update import BatchTrainer
from tests.conformance.test_trainer_engine import HEAD, SMALL, batch
from tests.forked import ForkedProcess, ForkServer

from .learner_world import ACCESS, RunningWorld

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), folder)
    return folder


@pytest.fixture(autouse=True)
def ranks_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if dist.is_initialized():  # by a trainer in bfloat16 of another file in this process
        dist.destroy_process_group()
    yield
    if torch_trainer._group is not None:
        torch_trainer._group.close()
    torch_trainer._group = None


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.fixture
def forked(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks that the learner starts. A slow test starts them as the learner does."""

    def start(rank: int, size: int, port: int, config: LearnerConfig, logs: Path) -> ForkedProcess:
        log = logs / f"rank-{rank}.log"
        arguments = (rank, size, "127.0.0.1", port, config.device, config.compute.rank_timeout_s)
        return server.start("rollmesh.services.learner.engines.rank_process", *arguments, out=log, err=log)

    monkeypatch.setattr(rank_group, "_start", start)


def config(folder: Path, model: Path, ranks: int, *, timeout_s: float = 120.0, **changes: Any) -> LearnerConfig:
    settings: dict[str, Any] = {
        "directory": str(folder),
        "model": str(model),
        "tensorboard": False,
        "optimizer": OptimizerConfig(lr=1e-3, warmup_updates=0),
        "compute": ComputeConfig(ranks=ranks, rank_timeout_s=timeout_s),
    }
    return LearnerConfig(**(settings | changes))


def advance(restored: Restored, last: int) -> Path:
    """Make the updates up to `last`, save a checkpoint and end the trainer."""
    digest = restored.log.digest
    for k in range(restored.engine.step + 1, last + 1):
        result = restored.engine.update(k, *batch(k))
        digest = restored.log.append(k, result.used_ids, incarnation=0, outcome="APPLIED")
    saved = restored.engine.save(restored.log, Position(update=last, digest=digest, head=HEAD), data_snapshot=b"")
    restored.engine.close()
    return saved


AVERAGE = {
    "loss": (LossTermChoice("ppo_clip"), LossTermChoice("kl", weight=0.1)),
    "reference": ReferenceConfig(kind="average", decay=0.5),
}


@pytest.mark.usefixtures("forked")
def test_changed_settings_of_the_optimizer_are_reported_after_a_checkpoint_of_two_ranks(
    tmp_path: Path, model: Path
) -> None:
    two = config(tmp_path / "run", model, 2)
    found = latest_checkpoint(advance(TorchTrainer.open(two), 1).parent)
    assert found is not None
    changed = OptimizerConfig(lr=1e-3, betas=(0.5, 0.6), weight_decay=0.1)
    trainer = BatchTrainer(load_model(found.path), UpdateConfig(optimizer=changed), seed=two.seed)
    assert set(found.restore(trainer)) == {"betas (0.9, 0.95) -> (0.5, 0.6)", "weight_decay 0.0 -> 0.1"}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("more", [{}, AVERAGE], ids=["policy", "moving average"])
def test_a_run_on_two_one_and_two_ranks_equals_a_run_on_one(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any]
) -> None:
    expected = load_file(advance(TorchTrainer.open(config(tmp_path / "one", model, 1, **more)), 6) / WEIGHTS_NAME)
    for ranks, last in ((2, 2), (1, 4), (2, 6)):
        saved = advance(TorchTrainer.open(config(tmp_path / "several", model, ranks, **more)), last)
    found = load_file(saved / WEIGHTS_NAME)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=5e-5, err_msg=name)
    assert "the current settings apply: compute.ranks 2 -> 1" in caplog.text
    assert "the current settings apply: compute.ranks 1 -> 2" in caplog.text


@pytest.mark.parametrize("start", ["forked", pytest.param("process", marks=pytest.mark.slow)])
async def test_a_killed_rank_ends_the_session_and_the_next_one_resumes_from_the_checkpoint(
    tmp_path: Path, model: Path, request: pytest.FixtureRequest, start: str
) -> None:
    """The ranks are forked, or started as the learner starts them."""
    if start == "forked":
        request.getfixturevalue("forked")
    killed: list[int] = []
    apart: list[bool] = []
    seen: list[str] = []

    async def at(point: LearnerFaultPoint) -> None:
        seen.append(node.progress.last_error)
        if point is LearnerFaultPoint.LEASED and running.world.step == 2 and not killed:
            assert torch_trainer._group is not None
            killed.append(torch_trainer._group._started[1].pid)
            apart.append(os.getpgid(killed[0]) != os.getpgid(0))
            os.kill(killed[0], signal.SIGKILL)

    settings = config(tmp_path / "learner", model, 2, checkpoint_every=2)
    async with RunningWorld(tmp_path, updates_max=3) as running:
        node = LearnerNode(settings, RunAddress(address=running.address, access=ACCESS, run="r"), at=at)
        async with node:
            await node.wait()
        assert running.world.resolutions == ["CONTINUED", "CONTINUED"], "the checkpoint of update 2"
        assert running.world.step == 3
        assert len(running.world.trained()) == len(set(running.world.trained()))
    assert any("RANK_FAILED: rank 1 of the trainer was killed by SIGKILL" in error for error in seen)
    assert apart == [True], "Ctrl-C at the terminal must not end it during the last update"


@pytest.mark.usefixtures("forked")
def test_a_rank_that_does_not_respond_is_named(tmp_path: Path, model: Path) -> None:
    engine = TorchTrainer.open(config(tmp_path, model, 2, timeout_s=40.0)).engine
    assert torch_trainer._group is not None
    process = torch_trainer._group._started[1]
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RankFailed, match=rf"did not respond within 40 s .*: rank 1 \(pid {process.pid}\) is stopped"):
        engine.update(1, *batch(1))
    assert process.returncode is not None, "it has ended"
    with pytest.raises(RankFailed, match="the next session starts them again"):
        engine.score([])


TERM = """
import torch.distributed as dist

class Term:
    needs = ()

    def __call__(self, inputs):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("only here")
        return inputs.logprobs.sum(), {}
"""

ESTIMATOR = """
import numpy as np
import torch.distributed as dist
from rollmesh.trainer import estimators
from rollmesh.trainer.estimators import Estimate

class Estimator(estimators.Estimator):
    def __init__(self, *, weights):
        pass

    def of_group(self, group):
        return {}

    def __call__(self, batch):
        return Estimate(advantages=np.full(int(batch.lengths.sum()), 1.0 + dist.get_rank(), np.float32))
"""


@pytest.mark.usefixtures("forked")
def test_an_error_of_user_code_on_another_rank_is_reported_with_its_text(tmp_path: Path, model: Path) -> None:
    (tmp_path / "term.py").write_text(TERM)
    settings = config(
        tmp_path,
        model,
        2,
        loss=(LossTermChoice(f"{tmp_path}/term.py:Term"),),
        packing=PackingConfig(row_tokens=16, micro_batch_tokens=16),  # so that rank 1 has a part of every step
    )
    engine = TorchTrainer.open(settings).engine
    with pytest.raises(LossFailed, match=r"(?s)rank 1: the loss term .* failed: .*only here"):
        engine.update(1, *batch(1))


@pytest.mark.usefixtures("forked")
def test_ranks_with_other_advantages_are_detected_before_the_step(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    settings = config(tmp_path, model, 2, estimator={"name": f"{tmp_path}/mine.py:Estimator"})
    settings = msgspec.convert(msgspec.to_builtins(settings), LearnerConfig)
    engine = TorchTrainer.open(settings).engine
    with pytest.raises(RanksDisagree, match="advantages and weights of an optimizer step of rank 1 differ"):
        engine.update(1, *batch(1))


# torchrun -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment that torchrun gives to rank 0 of 2."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))


def rank_one(server: ForkServer, settings: LearnerConfig, folder: Path) -> ForkedProcess:
    """Start rank 1 of torchrun with the configuration of its host."""
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: os.environ[name] for name in names} | {"RANK": "1", "LOCAL_RANK": "1"}
    argument = msgspec.json.encode(settings).decode()
    out, err = folder / "rank.out", folder / "rank.err"
    return server.start("tests.integration.torchrun_rank", argument, out=out, err=err, env=env)


@pytest.mark.usefixtures("torchrun")
def test_ranks_of_torchrun_train_together(tmp_path: Path, model: Path, server: ForkServer) -> None:
    other = rank_one(server, config(tmp_path / "elsewhere", model, 1), tmp_path)
    saved = advance(TorchTrainer.open(config(tmp_path / "learner", model, 1)), 1)
    assert other.wait(60) == 0
    expected = advance_alone(tmp_path / "one", model)
    for name, values in load_file(saved / WEIGHTS_NAME).items():
        np.testing.assert_allclose(values, expected[name], atol=5e-5, err_msg=name)


def advance_alone(folder: Path, model: Path) -> dict[str, Any]:
    """Return the weights after update 1 on one rank."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name)
    return load_file(advance(TorchTrainer.open(config(folder, model, 1)), 1) / WEIGHTS_NAME)


@pytest.mark.usefixtures("torchrun")
def test_ranks_of_torchrun_take_the_sources_that_rank_0_got_at_its_attach(
    tmp_path: Path, model: Path, server: ForkServer
) -> None:
    other = rank_one(server, config(tmp_path / "elsewhere", model, 1), tmp_path)
    TorchTrainer.open(config(tmp_path / "learner", model, 1))
    advance(TorchTrainer.open(config(tmp_path / "learner", model, 1, external_sources=("dataset",))), 1)
    assert other.wait(60) == 0


@pytest.mark.usefixtures("torchrun")
def test_hosts_with_other_settings_are_rejected(tmp_path: Path, model: Path, server: ForkServer) -> None:
    other = rank_one(server, config(tmp_path / "elsewhere", model, 1, optimizer=OptimizerConfig(lr=5e-3)), tmp_path)
    with pytest.raises(RanksDisagree, match="the settings of rank 1 differ from those of rank 0"):
        TorchTrainer.open(config(tmp_path / "learner", model, 1))
    assert other.wait(60) == 1


@pytest.mark.usefixtures("torchrun")
def test_the_number_of_ranks_must_be_that_of_torchrun(tmp_path: Path, model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"`learner.compute.ranks` must be 2, the number of processes of torchrun, or 1, got 3"
    ):
        TorchTrainer.open(config(tmp_path, model, 3))


@pytest.mark.usefixtures("torchrun")
def test_the_checkpoints_of_ranks_of_torchrun_cannot_be_copied(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="`checkpoint_async` must be false with several ranks"):
        TorchTrainer.open(config(tmp_path, model, 1, checkpoint_async=True))


def test_a_device_of_one_rank_is_rejected(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="`learner.device` must be a kind of device with 2 ranks"):
        TorchTrainer.open(config(tmp_path, model, 2, device="cuda:0"))


def test_an_error_that_is_not_of_the_group_is_raised_as_it_is(tmp_path: Path) -> None:
    group = RankGroup(join(0, 1, HashStore(), "cpu", 10.0), {}, tmp_path, 10.0)
    error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as caught, group.call("update"):
        raise error
    assert caught.value is error
    assert error.__cause__ is None, "a cause that is the error itself would make loops over causes endless"
    assert not dist.is_initialized()
