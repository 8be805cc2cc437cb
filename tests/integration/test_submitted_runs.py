"""Whole runs of submitted tasks: in one process with restarts, and with clients in Python and Node.js that are written
from docs/trainers.md alone."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.client import Client
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.mesh import create_run
from rollmesh.services.coordinator import readings
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.metrics import SUBMITTED
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import run_pb2, types_pb2

from ..chaos.world import mesh_config, save_model_folder
from .external_trainer_mesh import ROOT, finish, node_trainer, write_weights
from .test_external_trainers import NODE_IS_HERE, install_node_packages
from .test_mesh import Operator
from .up_mesh import audited, up

TASKS = ROOT / "configs" / "examples" / "submitted_tasks.jsonl"
SPEC = ROOT / "configs" / "submitted.json"
TRAIN_S_MAX = 400.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def config(model: Path) -> MeshConfig:
    """Four groups of four per update; the fake model answers at random. The bound is so large that no sample of 30
    tasks ends as stale."""
    run: dict[str, Any] = {
        "max_staleness": 8,
        "batch_groups": 4,
        "group_size": 4,
        "updates_max": 0,
        "submitted_tasks": True,
    }
    made = mesh_config(model, **run)
    data = msgspec.structs.replace(made.data, source=Extension("submitted"), selector=Extension("uniform"))
    return msgspec.structs.replace(made, data=data)


def task(number: int) -> types_pb2.Task:
    prompt = types_pb2.Message(role="user", content=f"{number}+1")
    return types_pb2.Task(task_id=f"t{number}", messages=[prompt], tools=["calculator"])


def has_answered(least: int, state: run_pb2.RunState) -> bool:
    return state.submitted.answered >= least


async def test_every_task_is_answered_once_while_services_restart(tmp_path: Path, model: Path) -> None:
    """Ten tasks at a time, with a restart of the services that could lose them after each submission and during the
    draws; submissions are repeated as after a lost response."""
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        async with Client(mesh.gateway_address, token=mesh.access.token) as client:
            run = client.run(mesh.run)
            for first, names in (
                (0, ("coordinator", "data")),
                (10, ("data", "reward")),
                (20, ("coordinator", "gateway")),
            ):
                tasks = [task(number) for number in range(first, first + 10)]
                keys = [types_pb2.AnswerKey(task_id=one.task_id, answers=["no"]) for one in tasks]
                await run.submit_tasks(tasks, keys)
                for name in names:
                    await mesh.restart(name)
                known = await run.submit_tasks(tasks, keys, finish=first == 20)
                assert known.open + known.drawn + known.answered == first + 10
                await operator.until(partial(has_answered, first + 1))
        await operator.finished()
        state, facts, report = await operator.state(), await operator.facts(), await operator.audit()
        read = await readings.read(mesh.service("coordinator"))
    assert {one.labels: one.value for one in read if one.metric is SUBMITTED} == {
        (mesh.run, "open"): 0,
        (mesh.run, "drawn"): 0,
        (mesh.run, "answered"): 30,
    }
    drawn = Counter(fact.task.task_id for fact in facts if isinstance(fact, f.GroupReserved))
    assert drawn == {f"t{number}": 1 for number in range(30)}
    assert report.holds, report.to_text()
    assert state.ended == "TASKS_EXHAUSTED"
    assert state.samples.reasons == {"trained": 30 * 4}
    assert (state.submitted.answered, state.submitted.finished) == (30, True)
    rewards = {
        r.outcome.name for fact in facts if isinstance(fact, f.EpisodeScored) for s in fact.samples for r in s.rewards
    }
    assert rewards == {"OK"}, "the reward service had the keys"


async def test_a_mesh_rejects_what_it_does_not_have(tmp_path: Path, model: Path) -> None:
    async with Mesh(config(model), run_dir=tmp_path / "run", services=["coordinator", "reward", "gateway"]) as mesh:
        await create_run(mesh.layout)
        async with Client(mesh.gateway_address, token=mesh.access.token) as client:
            run = client.run(mesh.run)
            for wrong, field in (
                (types_pb2.Task(agent="other"), "agent"),
                (types_pb2.Task(tools=["calculator", "browser"]), "tools"),
                (types_pb2.Task(scorers=["other"]), "scorers"),
            ):
                one = task(1)
                one.MergeFrom(wrong)
                with pytest.raises(InvalidInput) as caught:
                    await run.submit_tasks([task(0), one])
                assert [violation.field for violation in caught.value.violations] == [f"tasks[1] (task t1).{field}"]
            assert (await run.submit_tasks([task(0)])).open == 1


def answers_of_clients(output: str) -> Counter[str]:
    """Return how often each task was printed as answered."""
    return Counter(re.findall(r"^(sum-\d+) ", output, re.MULTILINE))


async def check_run(folder: Path) -> None:
    report = await audited(folder, "submitted")
    assert (report.samples.trained, report.samples.live) == (6 * 4, 0)
    assert report.updates == 2, "four groups, then the rest"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_python_program_of_the_documentation_gets_every_trajectory(tmp_path: Path, model: Path) -> None:
    page = (ROOT / "docs" / "trainers.md").read_text()
    (program,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "submit_tasks" in block]
    (tmp_path / "submit.py").write_text(program)
    async with up(config(model), tmp_path) as mesh:
        (mesh.folder / "model").mkdir(exist_ok=True)
        write_weights(mesh.folder / "model" / "model.safetensors")
        output = await finish(
            [sys.executable, tmp_path / "submit.py", mesh.gateway, mesh.folder, SPEC, TASKS], limit_s=200
        )
    names = [json.loads(line)["task"]["task_id"] for line in TASKS.read_text().splitlines()]
    assert answers_of_clients(output) == dict.fromkeys(names, 4)
    await check_run(mesh.folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not NODE_IS_HERE, reason="needs node and npm")
async def test_the_node_trainer_submits_and_gets_every_trajectory(tmp_path: Path, model: Path) -> None:
    await install_node_packages()
    async with up(config(model), tmp_path) as mesh:
        trainer = node_trainer(mesh, weights=write_weights(tmp_path / "w"), spec=SPEC, out=tmp_path / "trained")
        output = await finish([*trainer, "--tasks", TASKS], limit_s=TRAIN_S_MAX)
    assert "submitted 6 tasks, 6 of them new" in output
    answered = Counter(" ".join(re.findall(r"^answered: (.*)$", output, re.MULTILINE)).split())
    assert answered == {f"sum-{number}": 1 for number in range(6)}
    await check_run(mesh.folder)
