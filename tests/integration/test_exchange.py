"""Two meshes with different tokenizers give each other their rollouts, while both restart services and the exchange
itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from rollmesh.app.exchange import Exchange, ExchangeSummary
from rollmesh.app.mesh_client import MeshAddress
from rollmesh.app.shared_rollouts import Selection
from rollmesh.mesh import Mesh
from rollmesh.mesh.mesh import create_run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.reward.config import ScorerConfig
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import MeshError
from rollmesh.shared.net.retry import RetryConfig
from rollmesh.v1 import run_pb2

from ..chaos.world import mesh_config, save_model_folder
from .test_mesh import Operator


class Vowels(Scorer):
    """The share of vowels in the last turn, because the fake model writes noise."""

    async def score(self, item: ScoreItem) -> float:
        text = item.whole_response().lower()
        return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))


def other_tokenizer(folder: Path) -> None:
    """Give the characters other ids: those of the tags stay, and the rest is in reverse order."""
    path = folder / "tokenizer.json"
    made = msgspec.json.decode(path.read_bytes())
    vocab = made["model"]["vocab"]
    plain = sorted(token for token in vocab if len(token) == 1)
    ids = sorted((vocab[token] for token in plain), reverse=True)
    vocab |= dict(zip(sorted(plain, key=vocab.get), ids, strict=True))
    path.write_bytes(msgspec.json.encode(made))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    first, second = (save_model_folder(tmp_path_factory.mktemp(name)) for name in ("first", "second"))
    other_tokenizer(second)
    a, b = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (first, second))
    assert a.encode("vowel").ids != b.encode("vowel").ids
    return first, second


def config(model: Path, name: str) -> Any:
    run: dict[str, Any] = {
        "name": name,
        "batch_groups": 4,
        "group_size": 2,
        "max_staleness": 1,
        "updates_max": 0,
        "success_reward": "vowels",
        "external_sources": ["peer"],
        "foreign": [{"source": "peer", "max_age": 20, "share": 0.5}],
    }
    made = mesh_config(model, **run)
    replaced, scorer = (
        msgspec.structs.replace,
        ScorerConfig(name="tests.integration.test_exchange:Vowels", reward="vowels"),
    )
    return replaced(
        made,
        learner=replaced(made.learner, engine=Extension("rollmesh.testing.fake_trainer:FakeTrainer")),
        rollout=replaced(made.rollout, agent=Extension("single_turn")),
        reward=replaced(made.reward, scorers=(scorer,)),
    )


def exchange(source: Mesh, target: Mesh, **fields: Any) -> Exchange:
    values: dict[str, Any] = {
        "selection": Selection(),
        "mesh": source.run,
        "per_minute": 6000.0,
        "retry": RetryConfig(retry_s=30.0, call_s=5.0),
    }
    return Exchange(
        source=source.layout,
        run=source.run,
        target=MeshAddress(address=target.gateway_address, access=target.access),
        to_run=target.run,
        **(values | fields),
    )


def has_trained(num: int, state: run_pb2.RunState) -> bool:
    return sum(one.samples.trained for one in state.submitted_samples) >= num


async def until_trained(*operators: Operator, num: int) -> None:
    for operator in operators:
        await operator.until(lambda state: has_trained(num, state))


@pytest.mark.row(
    "S010", missing="the weak node's reward rises faster with J > 0 than with J = 0 (`python -m benchmarks swarm`)"
)
async def test_two_meshes_exchange_rollouts_while_services_and_the_exchange_restart(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    async with (
        Mesh(config(models[0], "north"), run_dir=tmp_path / "north") as north,
        Mesh(config(models[1], "south"), run_dir=tmp_path / "south") as south,
    ):
        operators = [Operator(north), Operator(south)]
        tasks = [asyncio.create_task(exchange(north, south).go()), asyncio.create_task(exchange(south, north).go())]
        await until_trained(*operators, num=4)
        await south.restart("coordinator")
        await south.restart("gateway")
        tasks[0].cancel()
        tasks[0] = asyncio.create_task(exchange(north, south).go())  # it begins with the first record again
        await until_trained(*operators, num=16)
        for operator, mesh in zip(operators, (north, south), strict=True):
            await operator.call("StopRun", run_pb2.StopRunRequest(run=mesh.run))
        done: list[ExchangeSummary] = await asyncio.gather(*tasks)
        assert all(one.shared > 0 and one.rejected == 0 and "has ended" in one.ended for one in done), done
        for operator, other in zip(operators, ("south", "north"), strict=True):
            report, facts = await operator.audit(), await operator.facts()
            assert report.holds, report.to_text()
            submitted = [fact for fact in facts if isinstance(fact, f.SamplesSubmitted)]
            keys = Counter(group.key for fact in submitted for group in fact.groups)
            assert set(keys.values()) == {1}
            assert all(key.startswith(f"{other}.") for key in keys)
            assert {fact.provenance.mesh for fact in submitted} == {other}
            admitted = [fact for fact in facts if isinstance(fact, f.GroupReserved) and fact.submitted_key]
            assert len({fact.submitted_key for fact in admitted}) == len(admitted)
            assert report.samples.trained > 0, "its rollouts are trained as well"
            assert report.submitted["peer"].trained >= 16
            shares = [
                sum(name in {fact.group for fact in admitted} for name in fact.groups)
                for fact in facts
                if isinstance(fact, f.BatchLeased)
            ]
            assert max(shares) <= 2, "half of a batch of four groups"


async def test_a_run_without_a_bound_for_peers_ends_the_exchange_with_the_remedy(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    alone = config(models[1], "alone")
    alone = msgspec.structs.replace(alone, run=msgspec.structs.replace(alone.run, foreign=()))
    async with (
        Mesh(config(models[0], "giver"), run_dir=tmp_path / "giver") as giver,
        Mesh(alone, run_dir=tmp_path / "alone", services=["coordinator", "reward", "gateway"]) as taker,
    ):
        early = asyncio.create_task(exchange(giver, taker).go())
        await create_run(taker.layout)
        with pytest.raises(MeshError, match=r"`run\.foreign` has no bound") as caught:
            await early
        assert caught.value.reason == "SAMPLES_NOT_ACCEPTED"
        await Operator(giver).call("StopRun", run_pb2.StopRunRequest(run=giver.run))
