"""A judge, a frozen opponent and a past step of the policy in one run: real HTTP, real weights, one process."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner, Result

from rollmesh.cli.__main__ import app
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.joining import JoinOptions, open_joined
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.inference import readings
from rollmesh.services.inference.metrics import VERSION
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.trainer.model_files import write_model_folder

from ..chaos.world import mesh_config
from ..unit.shared.chat_server import ChatServer, chat_server, completion, failure
from .coordinator_mesh import eventually
from .test_mesh import Operator

PLUGINS = Path(__file__).parent / "endpoint_plugins.py"
SHAPE = TinyModelConfig(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, context_max=1024
)
NUM = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The opponent: a tiny model with random weights. The policy of the fake engine has its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(SHAPE, seed=5), build_tokenizer(model_max_length=SHAPE.context_max), folder)
    return folder


def table(server: ChatServer, model: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """The three endpoints, each with `options`."""
    judge = {"kind": "openai", "base_url": server.url, "model": "judge-1", "retry_s": 0.0, "price_prompt": 1000.0}
    opponent = {"kind": "frozen", "model": str(model), "engine": {"name": "torch"}}
    past = {"kind": "policy_step", "step": 0}
    entries: dict[str, dict[str, Any]] = {"judge": judge, "opponent": opponent, "past": past}
    return {name: entry | options for name, entry in entries.items()}


def config(model: Path, endpoints: dict[str, dict[str, Any]], **run: Any) -> MeshConfig:
    """Two groups of two per update; the fake engines hold two versions."""
    made = mesh_config(
        model, batch_groups=2, group_size=2, max_staleness=0, episode_lease_s=30.0, success_reward="judged", **run
    )
    tree = msgspec.to_builtins(made)
    tree["endpoints"] = endpoints
    tree["inference"]["engine"]["options"]["versions_max"] = 2
    tree["rollout"]["agent"] = f"{PLUGINS}:PlaysOpponent"
    tree["reward"]["scorers"] = [{"name": f"{PLUGINS}:Judge", "reward": "judged"}]
    return config_from_dict(MeshConfig, tree)


class ChangingJudge:
    """Returns another number for each request, so that only recorded answers give the same rewards."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        self.num += 1
        return completion(json.dumps((self.num * 37 % 100) / 100), prompt_tokens=20, completion_tokens=1)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


async def rollout(folder: Path, made: MeshConfig, name: str) -> list[dict[str, Any]]:
    """Run `rollmesh rollout` in a thread, and return the lines that it wrote."""
    path, out = folder / f"{name}.yaml", folder / f"{name}.jsonl"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(made)))
    done = await asyncio.to_thread(run, "rollout", path, "-n", NUM, "--out", out, "--run-dir", folder / name)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in out.read_text().splitlines()]


def rewards_of(lines: list[dict[str, Any]]) -> dict[str, float]:
    return {line["sample_id"]: line["rewards"][0]["value"] for line in lines}


async def test_answers_are_stored_with_the_episode_shown_and_replayed(tmp_path: Path, model: Path) -> None:
    async with chat_server(ChangingJudge()) as server:
        lines = await rollout(tmp_path, config(model, table(server, model, record="answers")), "first")
        replaying = table(server, model, replay="answers")
    assert len(lines) == NUM == len(server.requests)
    for line in lines:
        uses = {(use["endpoint"], use["caller"]): use for use in line["endpoints"]}
        assert uses.keys() == {("opponent", "agent"), ("past", "agent"), ("judge", "Judge@1")}
        judged = uses["judge", "Judge@1"]
        assert (judged["calls"], judged["prompt_tokens"], judged["completion_tokens"]) == (1, 20, 1)
        assert judged["price"] == pytest.approx(0.02)
        assert all(use["latency_s"] > 0 and use["completion_tokens"] > 0 for use in uses.values())
    assert float((tmp_path / "first" / "endpoints" / "judge.spent").read_text()) == pytest.approx(NUM * 0.02)
    shown = await asyncio.to_thread(run, "show", tmp_path / "first", lines[0]["sample_id"])
    assert "judge 1 answer to Judge@1  20 + 1 tokens, price 0.02" in shown.output
    assert "opponent 1 answer to agent" in shown.output

    replaying["opponent"]["nodes"] = 0  # neither the judge nor the opponent runs
    again = await rollout(tmp_path, config(model, replaying), "second")
    assert rewards_of(again) == rewards_of(lines)
    assert {use["replayed"] for line in again for use in line["endpoints"]} == {1}
    assert not (tmp_path / "second" / "endpoints").exists()


async def test_nodes_keep_a_past_step_and_a_node_of_an_endpoint_may_join_later(tmp_path: Path, model: Path) -> None:
    async with chat_server(ChangingJudge()) as server:
        endpoints = table(server, model)
        endpoints["opponent"]["nodes"] = 0
        made = config(model, endpoints, updates_max=4)
        async with Mesh(made, run_dir=tmp_path / "run") as mesh, AsyncExitStack() as running:
            operator = Operator(mesh)
            joining = JoinOptions(
                kind="endpoint-opponent",
                address=mesh.gateway_address,
                token_file=tmp_path / "run" / "token",
                folder=tmp_path / "joined",
            )
            layout, node = await open_joined(joining)
            assert node.startswith("endpoint-opponent-")
            joined = await running.enter_async_context(
                Mesh(layout.config, run_dir=layout.run_dir, layout=layout, services=[node])
            )
            assert joined.running == (node,)
            await operator.finished()
            states = [mesh.service(f"inference-{n}").state for n in range(2)]

            async def serve_the_last_version() -> bool:
                return all(state.active is not None and state.active.step == 4 for state in states)

            await eventually(serve_the_last_version)
            report, facts = await operator.audit(), await operator.facts()
            held = [[version.step for version in state.held] for state in states]
            steps = [
                [one.value for one in await readings.read(server) if one.metric is VERSION]
                for server in (mesh.service("inference-0"), joined.service(node))
            ]
    assert report.holds, report.to_text()
    assert (report.samples.trained, report.samples.failed) == (16, 0)
    assert held == [[0], [0]]
    assert steps == [[4.0], []], "the version of an endpoint is not a step of the run, so it never counts as old"
    assert not [fact.cause for fact in facts if isinstance(fact, f.EpisodeReturned)]


async def test_a_failing_judge_fails_episodes_as_infra_and_none_is_lost(tmp_path: Path, model: Path) -> None:
    judge, broken = ChangingJudge(), iter(range(5))

    def respond(body: dict[str, Any]) -> Any:
        return judge(body) if next(broken, None) is None else failure(500, "judge is down")

    async with chat_server(respond) as server:
        made = config(model, table(server, model), updates_max=2)
        async with Mesh(made, run_dir=tmp_path / "run") as mesh:
            operator = Operator(mesh)
            await operator.finished()
            report, facts = await operator.audit(), await operator.facts()
    assert report.holds, report.to_text()
    assert (report.samples.trained, report.samples.failed) == (8, 0)
    causes = [fact.cause for fact in facts if isinstance(fact, f.EpisodeReturned)]
    assert len(causes) == 5
    assert all("endpoint `judge`: POST" in cause and "HTTP 500" in cause for cause in causes), causes


def test_check_reports_what_the_table_lacks_with_the_key(tmp_path: Path, model: Path) -> None:
    endpoints: dict[str, dict[str, Any]] = {
        "judge": {"kind": "openai", "base_url": "http://h/v1", "model": "m", "key_env": "ROLLMESH_NO_SUCH_KEY"},
        "opponent": {"kind": "frozen", "model": "none"},
        "past": {"kind": "policy_step", "step": 0},
    }
    tree = msgspec.to_builtins(config(model, endpoints))
    tree["inference"]["engine"]["options"]["versions_max"] = 1
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    checked = run("check", path)
    assert checked.exit_code == 2, checked.output
    said = " ".join(checked.output.split())
    for what in (
        "`endpoints.judge`: `key_env`: the environment variable ROLLMESH_NO_SUCH_KEY must contain",
        "`endpoints.opponent`: `model`: ",
        "`endpoints.past.kind` policy_step needs an engine with several sets of weights",
    ):
        assert what in said, said
