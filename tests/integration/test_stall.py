"""A stalled run records the cause: each service is removed in turn, and the cause names it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.mesh import Mesh
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.learner.fault_points import LearnerFaultPoint
from rollmesh.v1 import run_pb2

from .test_cli import CONFIG, mine  # noqa: F401  (a fixture)
from .test_mesh import Operator, config, model, policy  # noqa: F401  (a fixture)

STALL_S = 1.5
OF_BUSY_HOST = ("LEASE_EXPIRED", "NODE_DEAD")
"""Causes of failed attempts on a host that executes nothing for longer than a lease."""


def root(state: run_pb2.RunState) -> str:
    return state.stalled.rpartition("; ")[2]


class Pause:
    """Holds the learner after it has leased a batch, until it is released."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, moment: LearnerFaultPoint) -> None:
        if moment is LearnerFaultPoint.LEASED:
            await self.go.wait()


TAKEN = (
    (("inference-0", "inference-1"), "inference-"),
    (("sandbox-0",), "sandbox-0 has left"),
    (("reward",), "reward has left"),
    (("data",), "data has left"),
    (("rollout-0",), "rollout-0 has left"),
    (("learner",), "learner has left"),
)
"""Services that are stopped together, and the cause that must name them."""


@pytest.mark.timeout(400)
async def test_a_part_that_is_taken_away_is_named_and_the_run_moves_again_with_it(tmp_path: Path, model: Path) -> None:  # noqa: F811
    made = config(model, updates_max=0, stall_s=STALL_S)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.until(lambda s: policy(s).applied_step >= 1)
        causes = [await stalled_without(mesh, operator, stopped, named) for stopped, named in TAKEN]
        facts = await operator.facts()
    assert set(causes) <= {fact.cause for fact in facts if isinstance(fact, f.RunStalled)}


async def stalled_without(mesh: Mesh, operator: Operator, stopped: tuple[str, ...], named: str) -> str:
    """Stop services until the run is stalled, and start them until there is another update. Return the cause."""
    for name in stopped:
        await mesh.stop(name)
    stalled = await operator.until(lambda s: named in root(s))
    assert stalled.idle_s >= STALL_S
    assert stalled.chain
    for name in stopped:
        await mesh.start(name)
    await operator.until(lambda s: not s.stalled and policy(s).applied_step > policy(stalled).applied_step)
    return stalled.stalled


async def test_a_learner_that_hangs_with_a_batch_says_in_which_phase(tmp_path: Path, model: Path) -> None:  # noqa: F811
    pause = Pause()
    made = config(model, updates_max=0, stall_s=STALL_S, batch_lease_s=60.0)
    async with Mesh(made, run_dir=tmp_path / "run", options={"learner": {"at": pause}}) as mesh:
        operator = Operator(mesh)
        await operator.until(lambda s: policy(s).applied_step >= 1)
        pause.go.clear()
        stalled = await operator.until(lambda s: "learner is at work: between phases of update" in root(s))
        assert stalled.stalled.startswith("run waits for update"), stalled.stalled
        pause.go.set()
        await operator.until(lambda s: not s.stalled)


BROKEN_SCORER = """
class Scorer:
    async def score(self, item):
        raise ZeroDivisionError("no such verdict")
"""


def test_a_scorer_that_always_fails_ends_train_with_its_cause_and_leaves_dead_letters(mine: Path) -> None:  # noqa: F811
    (mine / "scorer.py").write_text(BROKEN_SCORER)
    text = CONFIG.replace("run: {", "run: {stall_s: 10.0, on_stall: exit, first_failures_max: 0, tries_max: 2, ")
    (mine / "mine.yaml").write_text(text.replace("eval_every: 2", "eval_every: 0"))
    out = mine / "run"
    done = CliRunner().invoke(app, ["train", "--in-process", str(mine / "mine.yaml"), "--out", str(out)])
    assert done.exit_code == 1, done.output
    assert "is stalled" in done.output
    assert "no such verdict" in done.output

    listed = CliRunner().invoke(app, ["dead", "list", str(out), "--json"])
    assert listed.exit_code == 0, listed.output
    letters = json.loads(listed.stdout)
    causes = {letter["letter"]["dead_id"]: letter["letter"]["cause"] for letter in letters}
    of_scorer = [dead_id for dead_id, cause in causes.items() if "no such verdict" in cause]
    assert of_scorer
    others = [cause for dead_id, cause in causes.items() if dead_id not in of_scorer]
    assert [cause for cause in others if not cause.startswith(OF_BUSY_HOST)] == []

    first = of_scorer[0]
    replayed = CliRunner().invoke(app, ["dead", "replay", str(out), first])
    assert replayed.exit_code == 0, replayed.output
    assert "1 tasks will be retried" in replayed.stdout
    again = CliRunner().invoke(app, ["dead", "list", str(out)])
    assert "(1 replayed)" in again.stdout.splitlines()[0]
    audit = CliRunner().invoke(app, ["audit", str(out)])
    assert audit.exit_code == 0, audit.output
