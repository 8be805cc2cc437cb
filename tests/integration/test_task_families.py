"""Task families in the mesh: what is right and wrong by the judge's jails, a run to its end, and learning (slow)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.demo.families.code import code_task
from rollmesh.demo.families.sql import sql_task
from rollmesh.mesh import Mesh
from rollmesh.mesh.config import MeshConfig
from rollmesh.services.data.config import DataConfig
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView
from rollmesh.services.reward.node import RewardNode
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import EpisodeKey, Message, Outcome
from rollmesh.shared.rpc.access import Access

from ..chaos.world import mesh_config, save_model_folder
from .test_cli_demo import ROOT, rollmesh
from .test_mesh import Operator

ACCESS = Access(token="t")
LOOP = "f(a): keep over 12, times 3, sum"
JOIN = "dak(name,rup,mef) gos(name,pib): pib where rup is lok"
ORDER = "dak(name,rup,mef): name by mef desc, first 2"


@asynccontextmanager
async def judging(tmp_path: Path, path: str) -> AsyncIterator[RewardNode]:
    """A reward node with its own sandbox node."""
    async with SandboxNode(SandboxConfig(), node_id="s", access=ACCESS, state_dir=tmp_path / "s") as sandbox:
        settings = {
            "scorers": [
                {"name": "tests", "reward": "correct", "options": {"pattern": "<answer>(.*)</answer>", "path": path}}
            ],
            "sandboxes": [sandbox.address],
        }
        config = config_from_dict(RewardConfig, settings)
        async with RewardNode(config, node_id="r", access=ACCESS) as node:
            yield node


async def judged(node: RewardNode, oracle_ref: str, *answers: str) -> list[tuple[float, str]]:
    """(all accepted, evidence) per answer; no jail may have failed."""
    items = [
        ScoreItem(
            key=EpisodeKey(run="r", task="t", group="g", episode=f"e{n}"),
            task=TaskView(task_id="t"),
            answer_key=node.engine.oracles.resolve(oracle_ref),
            messages=(Message(role="assistant", content=f"<answer>{answer}</answer>"),),
            sample_id=f"s{n}",
        )
        for n, answer in enumerate(answers)
    ]
    scored = await node.engine.score(items)
    assert all(reward.outcome is Outcome.OK for rewards in scored for reward in rewards)
    return [(rewards[0].value, rewards[0].evidence) for rewards in scored]


async def test_functions_are_judged_by_what_they_do(tmp_path: Path) -> None:
    right = [code_task(LOOP).solution, "def f(a):return 3*sum(x for x in a if x>=13)"]
    wrong = [
        "def f(a):\n s=0\n for x in a:\n  if x>11:s+=x*3\n return s",
        "def f(a):return 0",
        "def g(a):return 1",
        "def f(",
    ]
    async with judging(tmp_path, "solution.py") as node:
        found = await judged(node, f"code:{LOOP}", *right, *wrong, "while 1:pass")
    assert [value for value, _ in found] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert "TLE" in found[-1][1]
    assert not any(str(code_task(LOOP).tests[-1].expected) in evidence for _, evidence in found[2:])


async def test_queries_are_judged_by_what_they_answer(tmp_path: Path) -> None:
    cases = {
        JOIN: {
            sql_task(JOIN).query: 1.0,
            "select pib from gos,dak where gos.name=dak.name and rup='lok' order by pib": 1.0,
            "select pib from gos": 0.0,
            "select rup,pib from dak join gos using(name) where rup='lok'": 0.0,
            "drop table dak": 0.0,
            "select pib from": 0.0,
            "with recursive n(i) as (select 1 union all select i+1 from n) select sum(i) from n": 0.0,
        },
        ORDER: {
            sql_task(ORDER).query: 1.0,
            "select name from (select * from dak order by mef desc limit 2) order by mef desc": 1.0,
            "select name from (select * from dak order by mef desc limit 2) order by mef": 0.0,
        },
    }
    async with judging(tmp_path, "query.sql") as node:
        for key, expected in cases.items():
            found = await judged(node, f"sql:{key}", *expected)
            assert dict(zip(expected, (value for value, _ in found), strict=True)) == expected


@pytest.mark.row("S095")
async def test_the_reward_of_think2sql_is_execution_accuracy(tmp_path: Path) -> None:
    """The scorer of the recipe, with a reference query and two databases. Rows of equal queries may be in any order,
    unless the manifest asks for it."""
    make = "create table p(name, age real); insert into p values "
    manifest: dict[str, Any] = {
        "kind": "sql",
        "gold": "select name from p where age > 1 order by age",
        "limits": {"cpu_s": 0.5},
        "tests": [{"setup": make + "('a', 3), ('b', 2), ('c', 0)"}, {"setup": make + "('d', 9), ('e', 2), ('e', 5)"}],
    }
    equivalent = "select name from p where not age <= 1 order by name"
    in_order = "select name from (select name, age from p where age > 1) order by age asc"
    endless = "with recursive n(i) as (select 1 union all select i+1 from n) select count(*) from n"
    async with SandboxNode(SandboxConfig(), node_id="s", access=ACCESS, state_dir=tmp_path / "s") as sandbox:
        recipe = config_from_dict(MeshConfig, {"recipe": "think2sql"}).reward
        config = msgspec.structs.replace(recipe, sandboxes=(sandbox.address,))
        async with RewardNode(config, node_id="r", access=ACCESS) as node:

            async def rewards(tests: dict[str, Any], *queries: str) -> list[tuple[float, Outcome]]:
                items = [
                    ScoreItem(
                        key=EpisodeKey(run="r", task="t", group="g", episode=f"e{n}"),
                        task=TaskView(task_id="t"),
                        answer_key=AnswerKey(tests=tests),
                        messages=(Message(role="assistant", content=f"First, rows.\n<answer>{query}</answer>"),),
                        sample_id=f"s{n}",
                    )
                    for n, query in enumerate(queries)
                ]
                return [(found[0].value, found[0].outcome) for found in await node.engine.score(items)]

            right, wrong, broken = (1.0, Outcome.OK), (0.0, Outcome.OK), (0.0, Outcome.INFRA_FAILURE)
            fewer = "select distinct name from p where age > 1"
            changing = "delete from p"
            draft = f"{fewer}</answer> No, with repetitions: <answer>{equivalent}"
            found = await rewards(manifest, manifest["gold"], equivalent, in_order, draft, fewer, changing)
            assert found == [right] * 4 + [wrong] * 2, "the last answer counts"
            assert await rewards({**manifest, "ordered": True}, equivalent, in_order) == [wrong, right]
            short = {**manifest, "tests": manifest["tests"][:1]}
            assert await rewards(short, endless) == [wrong]
            assert await rewards({**short, "gold": changing}, equivalent) == [broken], "the reference is read-only too"


@pytest.mark.parametrize(("kind", "path"), [("code", "solution.py"), ("sql", "query.sql")])
async def test_family_goes_through_the_whole_mesh(kind: str, path: str, tmp_path: Path) -> None:
    """A policy that writes noise, judged in real jails: each sample is scored, none by a broken judge, and the run
    ends."""
    base = mesh_config(save_model_folder(tmp_path / "model"), batch_groups=2, group_size=2, updates_max=2)
    scorers = [{"name": "tests", "reward": "correct", "options": {"pattern": "", "path": path}}]
    config = msgspec.structs.replace(
        base,
        data=config_from_dict(DataConfig, {"source": {"name": kind, "options": {"num_train": 20, "num_test": 5}}}),
        reward=config_from_dict(RewardConfig, {"scorers": scorers, "finalizers": ["keep_all"]}),
        rollout=msgspec.structs.replace(base.rollout, agent=Extension("single_turn")),
        sandbox=SandboxConfig(),
    )
    async with Mesh(config, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        state = await operator.until(lambda state: bool(state.ended))
        report = await operator.audit()
    assert state.ended == "UPDATES_MAX"
    assert report.holds


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["code", "sql"])
def test_family_is_learned_on_held_out_tasks(kind: str, tmp_path: Path) -> None:
    summary: dict[str, Any] = rollmesh(
        "train", str(ROOT / "configs" / f"{kind}.yaml"), "processes.enabled=false", "--out", str(tmp_path / "run")
    )
    assert summary["heldout_success_after"] >= summary["heldout_success_before"] + 0.1
    assert rollmesh("audit", str(tmp_path / "run"))["holds"]
