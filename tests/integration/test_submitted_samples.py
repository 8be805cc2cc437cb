"""Samples that clients submit to a whole mesh: given to its workers, scored by its scorers, trained in their own
account, while services restart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.client import Client
from rollmesh.mesh import Mesh
from rollmesh.mesh.mesh import create_run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import InvalidInput, SampleConflict, SamplesNotAccepted, TokenizerMismatch
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

from ..chaos.world import mesh_config, save_model_folder
from .test_mesh import Operator

PEER = types_pb2.SEGMENT_SOURCE_PEER
FOREIGN = [{"source": "peer", "max_age": "unlimited", "share": 0.5}]
ORIGIN = events_pb2.Provenance(mesh="north", run="their-run", step=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def config(model: Path, **run: Any) -> Any:
    values: dict[str, Any] = {
        "batch_groups": 4,
        "group_size": 2,
        "external_sources": ["peer"],
        "foreign": FOREIGN,
        "updates_max": 12,
    }
    made = mesh_config(model, **(values | run))
    learner = msgspec.structs.replace(made.learner, engine=Extension("rollmesh.testing.fake_trainer:FakeTrainer"))
    return msgspec.structs.replace(made, learner=learner)


def task(name: str) -> types_pb2.Task:
    return types_pb2.Task(task_id=name, messages=[types_pb2.Message(role="user", content="1+1")])


def episode(key: str, number: int, text: str) -> types_pb2.Episode:
    said = types_pb2.Segment(
        parent=-1, role=types_pb2.SEGMENT_ROLE_ACTION, source=PEER, messages=[types_pb2.Message(content=text)]
    )
    name = types_pb2.EpisodeKey(task=f"task-{key}", group=key, episode=str(number))
    return types_pb2.Episode(key=name, segments=[said])


def group(key: str, answers: tuple[str, ...] = ("2", "3")) -> list[types_pb2.Episode]:
    return [episode(key, number, f"<answer>{text}</answer>") for number, text in enumerate(answers)]


def tokens_of(key: str) -> types_pb2.Episode:
    made = episode(key, 0, "")
    made.segments[0].MergeFrom(types_pb2.Segment(token_ids=bytes(8)))
    made.segments[0].parent = 0
    prompt = types_pb2.Segment(
        parent=-1,
        role=types_pb2.SEGMENT_ROLE_CONTEXT,
        source=types_pb2.SEGMENT_SOURCE_PROMPT,
        token_ids=bytes(8),
    )
    made.segments.insert(0, prompt)
    return made


async def submit(run: Any, episodes: list[types_pb2.Episode], **fields: Any) -> run_pb2.SubmittedSamples:
    names = dict.fromkeys(one.key.task for one in episodes)
    keys = [types_pb2.AnswerKey(task_id=name, answers=["2"]) for name in names]
    values = {"source": PEER, "answer_keys": keys, "provenance": ORIGIN} | fields
    found: run_pb2.SubmittedSamples = await run.submit_samples(episodes, map(task, names), **values)
    return found


async def test_samples_of_a_peer_are_trained_once_while_services_restart(tmp_path: Path, model: Path) -> None:
    given = [one for number in range(6) for one in group(f"k{number}")]
    equal = group("equal", ("3", "3"))
    async with Mesh(config(model), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        async with Client(mesh.gateway_address, token=mesh.access.token) as client:
            run = client.run(mesh.run)
            assert (await submit(run, given + equal)).groups == 7
            await mesh.restart("coordinator")
            assert (await submit(run, given)).groups == 7, "as after a lost response"
        await operator.finished()
        state, facts, report = await operator.state(), await operator.facts(), await operator.audit()
    assert report.holds, report.to_text()
    (account,) = state.submitted_samples
    assert (account.groups, account.waiting, account.dropped) == (7, 0, 0)
    assert account.samples.reasons == {"trained": 12, "filtered/ZERO_VARIANCE": 2}
    assert sum(account.trained_by_age.values()) == 12
    assert account.tokens_trained > 0
    taken = Counter(fact.submitted_key for fact in facts if isinstance(fact, f.GroupReserved) and fact.submitted_key)
    assert taken == dict.fromkeys([*(f"k{number}" for number in range(6)), "equal"], 1)
    assert state.samples.trained == 12 * 4 * 2 - 12, "the rest of the batches"
    assert state.samples.reserved == state.samples.live + sum(
        getattr(state.samples, end) for end in ("trained", "stale", "filtered", "failed", "cancelled", "exported")
    )
    of_peer = {fact.group for fact in facts if isinstance(fact, f.GroupReserved) and fact.submitted_key.startswith("k")}
    scored = [fact for fact in facts if isinstance(fact, f.EpisodeScored) and fact.group in of_peer]
    assert {r.value for fact in scored for sample in fact.samples for r in sample.rewards} == {0.0, 1.0}
    assert report.submitted["peer"].trained == 12
    assert sum(report.ages["peer"].values()) == 12


async def test_bad_samples_are_rejected_with_their_field(tmp_path: Path, model: Path) -> None:
    services = ["coordinator", "reward", "gateway"]
    async with Mesh(config(model), run_dir=tmp_path / "run", services=services) as mesh:
        await create_run(mesh.layout)
        async with Client(mesh.gateway_address, token=mesh.access.token) as client:
            run = client.run(mesh.run)
            await submit(run, group("a"))
            with pytest.raises(SampleConflict):
                await submit(run, group("a", ("4", "5")))
            wrong, human, tokens = group("b"), group("c"), [tokens_of("d")]
            wrong[1].segments[0].source = types_pb2.SEGMENT_SOURCE_POLICY
            with pytest.raises(InvalidInput, match="must be PEER in an ACTION"):
                await submit(run, wrong)
            for one in human:
                one.segments[0].source = types_pb2.SEGMENT_SOURCE_HUMAN
            with pytest.raises(SamplesNotAccepted, match="`max_age`, which may be unlimited"):
                await submit(run, human, source=types_pb2.SEGMENT_SOURCE_HUMAN)
            with pytest.raises(TokenizerMismatch):
                await submit(run, tokens, tokenizer_digest="ab" * 32)
            state = await run.state()
            assert state.submitted_samples[0].groups == 1
