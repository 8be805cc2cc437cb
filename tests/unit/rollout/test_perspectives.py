"""The agent that merges the answers of several roles into a chain."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.agents.perspectives import consistent, merged
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, Source
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

from ..shared.chat_server import chat_server

SAID = {
    "teachers": ["x <answer>No</answer>", "t <answer>Yes</answer>", "u <answer>yes</answer>"],
    "students": ["s <answer>No</answer>", "no idea", "v <answer>No</answer>"],
    "parents": ["none", "none", "none"],
}


async def played(roles: Any, said: dict[str, list[str]], **given: Any) -> tuple[LocalMesh, Episode]:
    left = {role: list(texts) for role, texts in said.items()}

    def script(text: str) -> str:
        role = text.partition("From" if "of: " not in text else "of: ")[2].partition(".")[0]
        return f"{left[role].pop(0) if role in left else '<answer>plain</answer>'}<|end|>"

    options = {"num_roles": 3, "num_answers": 3, **given.pop("options", {})}
    async with chat_server(lambda body: json.dumps(roles)) as server:
        entry = {"kind": "openai", "base_url": server.url, "model": "m", "retry_s": 0.0}
        endpoints = Endpoints({"roles": config_from_dict(EndpointConfig, entry)})
        config = RolloutConfig(limits=LimitsConfig(**given.pop("limits", {})))
        mesh = LocalMesh(script=script, endpoints=endpoints, config=config)
        report = await mesh.runner(load_agent(Extension("perspectives", options))).run(lease(["Is it good"], **given))
        await endpoints.close()
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED, report.failure.message
    return mesh, mesh.samples.episodes[-1]


@pytest.mark.row("S103")
async def test_a_chain_has_the_majority_answer_of_each_role_and_is_the_only_trained_text() -> None:
    mesh, episode = await played(list(SAID), SAID)
    (sample,) = episode.samples
    prompt, chain = episode.path_segments(sample)
    assert "of: " not in mesh.tokenizer.decode(prompt.token_ids), "the chain answers the plain question"
    text = mesh.tokenizer.decode(chain.token_ids)
    *views, answer = text.removesuffix("<|end|>").split("\n\n")
    assert set(views) == {"From the perspective of teachers: t Yes", "From the perspective of students: s No"}
    assert answer in ("<answer>Yes</answer>", "<answer>No</answer>")
    assert (chain.source, chain.logprobs, chain.num_trainable) == (Source.REWRITTEN, None, chain.num_tokens)
    others = [segment for segment in episode.segments if segment is not chain]
    assert not any(segment.num_trainable for segment in others)


def test_the_chain_ends_with_the_majority_of_the_roles_or_with_the_answer_of_each() -> None:
    views = [
        (role, f"{role} says <answer>{answer}</answer>", answer) for role, answer in zip("abc", "NYN", strict=True)
    ]
    assert merged(views, "convergent").endswith("From the perspective of c: c says N\n\n<answer>N</answer>")
    assert merged(views, "divergent").endswith("<answer>a: N; b: Y; c: N</answer>")
    assert consistent(["a", "b"]) is None


async def test_a_question_without_any_answer_is_not_trained_and_evaluations_have_one_answer() -> None:
    _, episode = await played(list(SAID), {role: ["none"] * 3 for role in SAID})
    assert [sample.trainable for sample in episode.samples] == [False]
    mesh, episode = await played([], {}, purpose=types_pb2.PURPOSE_EVAL)
    (sample,) = episode.samples
    assert mesh.tokenizer.decode(np.concatenate([s.token_ids for s in episode.path_segments(sample)])).endswith(
        "<answer>plain</answer><|end|>"
    )


async def test_a_limit_before_the_chain_leaves_one_untrained_sample() -> None:
    _, episode = await played(list(SAID), SAID, limits={"turns_max": 4})
    assert [sample.trainable for sample in episode.samples] == [False]


async def test_roles_that_are_not_a_list_of_names_are_an_infra_failure() -> None:
    for roles in (["one"], {"a": 1}, ["a", "b", 3]):
        with pytest.raises(AssertionError, match="must return a JSON list of 3 names"):
            await played(roles, SAID)
