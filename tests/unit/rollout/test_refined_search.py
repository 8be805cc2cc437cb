"""The agent with a refiner: what the model observes, what is asked, and the sample with the given answer."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.services.reward.item import judged_path
from rollmesh.services.rollout.agent import load_agent
from rollmesh.shared.codec.trajectory import decode_segment
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, Role, Source
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

from ..shared.chat_server import chat_server

RESULT = "[1] Babbage\nid: babbage\nurl: https://wiki.test\nDesigned an engine.\n\n[2] Other\nid: other\nNothing"
REFINED = "Babbage designed an engine."


def search(text: str) -> str:
    """Return results as the tool `search` does, in place of the default tool of the fakes."""
    return RESULT if "engine" in text else ""


def reasoner(text: str) -> str:
    """A model that searches twice, once without a result, and then answers."""
    calls = text.count("<|tool|>")
    return ["<tool_call>engine</tool_call><|end|>", "<tool_call>x</tool_call><|end|>", "<answer>He</answer><|end|>"][
        calls
    ]


async def run(asked: list[str], solution: str | None = None, **of_lease: Any) -> tuple[Episode, list[list[str]]]:
    """Run one episode; return it and the texts of each of its samples."""

    def refine(body: dict[str, Any]) -> str:
        asked.append(body["messages"][0]["content"])
        return REFINED

    async with chat_server(refine) as server:
        entry = {"kind": "openai", "base_url": server.url, "model": "m", "retry_s": 0.0}
        endpoints = Endpoints({"refiner": config_from_dict(EndpointConfig, entry)})
        extras = {"solution": solution}
        mesh = LocalMesh(script=reasoner, functions={"call": search}, endpoints=endpoints, private_extras=extras)
        report = await mesh.runner(load_agent(Extension("refined_search"))).run(lease(tools=["calculator"], **of_lease))
        await endpoints.close()
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED, report.failure
    (item,) = mesh.scorer.items
    segments = [decode_segment(segment) for segment in item.segments]
    texts = [[message.content for message in judged_path(segments, sample.leaf)[1]] for sample in item.samples]
    return mesh.samples.episodes[report.payload.sequence - 1], texts


async def test_the_model_observes_the_ids_and_what_the_refiner_returns() -> None:
    asked: list[str] = []
    _, (texts,) = await run(asked, messages=["Who designed it?"])
    assert texts[2] == f"id: babbage\nid: other\n{REFINED}"
    assert texts[4] == "", "an empty result is not refined"
    (question,) = asked
    assert "Who designed it?" in question
    assert "[Call of the tool calculator]\nengine" in question
    assert RESULT in question


@pytest.mark.row("S092")
async def test_the_right_answer_is_also_given_after_the_same_queries_while_training() -> None:
    episode, (given, sampled) = await run([], "<answer>Babbage</answer>")
    assert given[:-1] == sampled[:-1]
    assert (given[-1], sampled[-1]) == ("<answer>Babbage</answer>", "<answer>He</answer>")
    assert [sample.weight for sample in episode.samples] == [0.25, 1.0]
    (segment,) = [segment for segment in episode.segments if segment.source is Source.DATASET]
    assert [s for s in episode.path_segments(episode.samples[0]) if s.num_trainable] == [segment]
    assert segment.role is Role.ACTION
    assert segment.loss_mask is None or segment.loss_mask.all()
    assert segment.logprobs is None, "so only supervised terms train on it"


async def test_no_answer_is_given_in_an_evaluation() -> None:
    _, texts = await run([], "<answer>Babbage</answer>", purpose=types_pb2.PURPOSE_EVAL)
    assert len(texts) == 1
