"""Trainers that use only protos/, as processes beside a mesh started by `rollmesh up`."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from rollmesh.app.config import load_train_config
from rollmesh.demo.model_process import make_in_process
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import MeshConfig
from rollmesh.services.reward.config import ScorerConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.model_files import write_model_folder

from ..chaos.world import mesh_config
from .external_trainer_mesh import (
    ROOT,
    finish,
    node_trainer,
    program,
    python_trainer,
    said,
    write_spec,
    write_weights,
)
from .up_mesh import audited, up

NODE_TRAINER = ROOT / "examples" / "trainer_node"
NODE_IS_HERE = shutil.which("node") is not None and shutil.which("npm") is not None
INSTALL_S_MAX = 400.0
TRAIN_S_MAX = 400.0
ALLOWED = {"grpc", "torch", "transformers", "rollmesh.v1"}
"""What the Python trainer may import beside the standard library."""
STANDARD = {
    "__future__",
    "collections.abc",
    "time",
    "typing",
    "contextlib",
    "hashlib",
    "json",
    "os",
    "pathlib",
    "struct",
    "sys",
    "threading",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with the tokenizer; the fake engine draws tokens of its vocabulary."""
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(TinyModelConfig(hidden_size=32), seed=0), build_tokenizer(), folder)
    return folder


SCORER = """
class Judge:
    async def score(self, item):
        from rollmesh.shared.domain.trajectory import Reward
        return Reward(name="", value=float(sum(item.answer_ids) % 2), answer=item.sample_id)
"""
"""Its answers are the names of the samples."""
SELECTOR = """
class Spy(MostSignal):
    def observe_trained(self, result):
        super().observe_trained(result)
        with open(LOG, "a") as file:
            file.write(f"{result.trained.group} {result.trained.mean_abs_advantage} {result.trained.num_tokens}\\n")
"""
"""Added to the selector of docs/extending.md. It records what trainers measured."""


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return tmp_path / "measured.txt"


@pytest.fixture
def config(model: Path, tmp_path: Path, measured: Path) -> MeshConfig:
    """Fake engine and fake sandbox; the rest of the mesh is the real one."""
    base = (ROOT / "examples" / "extending" / "most_signal.py").read_text()
    (tmp_path / "spy.py").write_text(f"{base}\nLOG = {str(measured)!r}\n{SELECTOR}")
    made = mesh_config(model)
    data = msgspec.structs.replace(made.data, selector=Extension(f"{tmp_path / 'spy.py'}:Spy"))
    (tmp_path / "judge.py").write_text(SCORER)
    scorer = ScorerConfig(name=f"{tmp_path / 'judge.py'}:Judge", reward="correct")
    reward = msgspec.structs.replace(made.reward, scorers=(scorer,))
    return msgspec.structs.replace(made, data=data, reward=reward)


def check_measured(measured: Path, num_groups_min: int) -> None:
    """Check that the selector got the measurements of the trainer. The run may end before it gets the last ones."""
    lines = [line.split() for line in measured.read_text().splitlines()]
    assert len({group for group, _, _ in lines}) >= num_groups_min
    assert all(float(advantage) >= 0 and int(num) > 0 for _, advantage, num in lines)


def check_seen(output: str, num_updates: int, *, num_members: int) -> None:
    """Check that the trainer read turns, answers and digests of all members of each leased group."""
    lines = re.findall(r"^groups: (\d+) members, (\d+) turns, (\d+) answers, (\d+) observations", output, re.MULTILINE)
    assert len(lines) == num_updates
    for members, turns, answers, observations in (map(int, line) for line in lines):
        assert members == num_members
        assert turns >= members
        assert answers == members  # the scorer of this test finds another one in each sample
        assert 2 <= observations <= turns  # the members of one task begin with the same one


def updates(output: str) -> list[int]:
    """Return the updates that a trainer printed, in order."""
    return [int(k) for k in re.findall(r"^update (\d+):", output, re.MULTILINE)]


# Python ---------------------------------------------------------------------------------------------------------------


def test_the_python_trainer_is_one_readable_file_and_imports_no_python_of_ours() -> None:
    source = (ROOT / "examples" / "trainer_grpc.py").read_text()
    tree = ast.walk(ast.parse(source))
    found = {name for node in tree for name in _modules(node)}
    assert found <= ALLOWED | STANDARD
    assert source.count("\n") <= 360


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_python_trainer_that_was_killed_goes_back_to_its_checkpoint(
    tmp_path: Path, config: MeshConfig, model: Path, measured: Path
) -> None:
    """Update 6 is committed but in no checkpoint when the trainer dies: it is rolled back and made again."""
    changes = {"batch_groups": 2, "group_size": 4, "updates_max": 8, "eval_every": 0}
    spec = write_spec(tmp_path / "spec.json", run="python", **changes)
    async with up(config, tmp_path) as mesh:
        trainer = python_trainer(mesh, model=model, spec=spec, out=tmp_path / "trained")
        async with program(trainer) as first:
            before = updates(await said(first, r"^update 6:", limit_s=TRAIN_S_MAX))
        resumed = await finish(trainer, limit_s=TRAIN_S_MAX)
    report = await audited(mesh.folder, "python")
    assert before == [1, 2, 3, 4, 5, 6]
    assert updates(resumed) == [6, 7, 8]
    check_seen(resumed, 3, num_members=8)
    assert report.updates == 8
    assert report.samples.live == 0
    assert report.samples.trained == 8 * 8
    check_measured(measured, 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_the_python_trainer_raises_held_out_success(tmp_path: Path) -> None:
    """The small demo's tasks and warm-started model, a mesh without a learner, and the external trainer."""
    made = load_train_config(ROOT / "configs" / "demo_small.yaml")
    assert made.made_model is not None
    folder = tmp_path / "model"
    await make_in_process(made.made_model, folder, seed=0, limit_s=900.0, on_step=lambda _: None)
    config = msgspec.structs.replace(made, made_model=None, model=str(folder))
    spec = ROOT / "configs" / "trainer_grpc.json"
    async with up(config, tmp_path) as mesh:
        trainer = python_trainer(mesh, model=folder, spec=spec, out=tmp_path / "trained")
        output = await finish(trainer, limit_s=2400.0)
    report = await audited(mesh.folder, "trainer_grpc")
    success = ast.literal_eval(re.findall(r"^held-out success: (.*)$", output, re.MULTILINE)[-1])
    assert success[40] >= success[0] + 0.1, output
    assert report.lag_max <= 2


# Node.js --------------------------------------------------------------------------------------------------------------


async def install_node_packages() -> None:
    """What package-lock.json names, once; two test processes may come here at a time."""
    with (NODE_TRAINER / "package.json").open() as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        if not (NODE_TRAINER / "node_modules" / ".package-lock.json").is_file():  # npm writes it last
            await finish(["npm", "ci", "--no-audit", "--no-fund", "--prefix", NODE_TRAINER], limit_s=INSTALL_S_MAX)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not NODE_IS_HERE, reason="needs node and npm")
async def test_a_trainer_in_node_leases_commits_and_publishes_20_updates(
    tmp_path: Path, config: MeshConfig, measured: Path
) -> None:
    await install_node_packages()
    changes = {"batch_groups": 2, "group_size": 4, "updates_max": 20, "eval_every": 0}
    spec = write_spec(tmp_path / "spec.json", run="node", **changes)
    async with up(config, tmp_path) as mesh:
        trainer = node_trainer(mesh, weights=write_weights(tmp_path / "w"), spec=spec, out=tmp_path / "trained")
        output = await finish(trainer, limit_s=TRAIN_S_MAX)
    report = await audited(mesh.folder, "node")
    assert updates(output) == list(range(1, 21))
    check_seen(output, 20, num_members=8)
    assert report.updates == 20
    assert report.samples.trained == 20 * 8
    check_measured(measured, 20)
