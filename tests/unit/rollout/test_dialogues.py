"""Agents that talk with other models over several turns: a patient, a user, and models of different prices."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, Outcome, Reward, Role
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.testing.rollout import FixedScorer, LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

from ..shared.chat_server import ChatServer, chat_server
from .reward_service import ServicePort, environment

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
Respond = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def talking(
    respond: Respond, script: Callable[[str], str], *scorers: Mapping[str, Any], **prices: float
) -> AsyncIterator[tuple[LocalMesh, ChatServer]]:
    """A mesh whose endpoints are one server; those of `prices` cost so much per million tokens."""
    async with chat_server(respond) as server:
        table = {
            name: config_from_dict(
                EndpointConfig,
                {"kind": "openai", "base_url": server.url, "model": name, "retry_s": 0.0, "price_completion": price},
            )
            for name, price in {"patient": 0.0, "user": 0.0, **prices}.items()
        }
        config = RolloutConfig(limits=LimitsConfig(context_tokens_max=8192))
        mesh = LocalMesh(script=script, endpoints=Endpoints(table), config=config)
        if scorers:
            mesh.scorer = ServicePort([*scorers])  # type: ignore[assignment]
        yield mesh, server
        await mesh.endpoints.close()


async def run(mesh: LocalMesh, agent: str, options: Mapping[str, Any], **of_lease: Any) -> Episode:
    report = await mesh.runner(load_agent(Extension(agent, dict(options)))).run(lease(**of_lease))
    assert report.outcome == COMPLETED, report.failure.message
    return mesh.samples.episodes[-1]


def turn_number(text: str) -> int:
    """The number of turns of the model before this one."""
    return text.count("<|assistant|>") - 1


# A doctor and a patient -----------------------------------------------------------------------------------------------

REPORT = "cough for two weeks"
KNOWN = {"How long?": ("answered", "Two weeks."), "Any pain?": ("unknown", ""), "How long now?": ("repeated", "")}


def doctor(*turns: str) -> Callable[[str], str]:
    """A model with these answers. `!` begins a turn without the opening tag."""
    return lambda text: f"<answer>{turns[turn_number(text)]}</answer><|end|>".replace("<answer>!", "")


async def consulted(*turns: str, **options: Any) -> tuple[Episode, float, ChatServer]:
    asking = [turn.replace("?", "\N{FULLWIDTH QUESTION MARK}") for turn in turns]
    known = {question.replace("?", "\N{FULLWIDTH QUESTION MARK}"): said for question, said in KNOWN.items()}

    def respond(body: dict[str, Any]) -> str:
        asked = body["messages"][0]["content"]
        assert REPORT in asked
        status, answer = known[asked.partition("[Question]\n")[2].partition("\n")[0]]
        return json.dumps({"status": status, "answer": answer})

    async with talking(respond, doctor(*asking), environment("inquiry", min=-25, max=10)) as (mesh, server):
        episode = await run(
            mesh, "consultation", {"turns_min": 5, "turns_max": 5, **options}, labels={"description": REPORT}
        )
    (sample,) = episode.samples
    (reward,) = sample.rewards
    assert reward.outcome is Outcome.OK
    return episode, reward.value, server


@pytest.mark.row("S068")
async def test_a_consultation_has_a_composite_reward_and_trains_the_doctor_alone() -> None:
    """By hand: 1 answered, -1 unknown, -2 repeated, and the diagnosis is judged by another scorer."""
    episode, value, server = await consulted("How long?", "Any pain?", "How long now?", "Diagnosis: a cold")
    assert value == 1 - 1 - 2
    seen = [s.messages[-1].content for s in episode.segments if s.role is Role.OBSERVATION]
    assert seen == [
        "Two weeks.\nTurn 1 of 5.",
        "I do not know.\nTurn 2 of 5.",
        "You have asked this before.\nTurn 3 of 5.",
    ]
    trained = {segment.role: segment.num_trainable for segment in episode.segments}
    assert [role for role, num in trained.items() if num] == [Role.ACTION]
    assert all(REPORT not in message.content for segment in episode.segments for message in segment.messages)
    assert "1. How long" in server.requests[1]["messages"][0]["content"]
    (use,) = episode.endpoints
    assert (use.endpoint, use.caller, use.calls) == ("patient", "agent", 3)


@pytest.mark.parametrize(
    ("turns", "reward", "asked"),
    [
        (["Diagnosis: a cold"], 0.0, 0),
        (["Any cough", "Diagnosis: a cold"], -2.0, 0),
        (["How? Long?", "Diagnosis: a cold"], -2.0, 0),
        (["!How long?", "Diagnosis: a cold"], -2.0, 0),
        (["How long?"] * 5, 4.0 - 5.0, 4),
    ],
    ids=["at once", "no question", "two questions", "no answer tag", "no diagnosis"],
)
async def test_malformed_questions_and_a_missing_diagnosis_cost_reward(
    turns: list[str], reward: float, asked: int
) -> None:
    _, value, server = await consulted(*turns)
    assert value == reward
    assert len(server.requests) == asked


async def test_a_patient_that_answers_nonsense_is_an_infra_failure() -> None:
    for answer in ({"status": "odd"}, {"status": "answered", "answer": ""}, ["answered"]):
        said = json.dumps(answer)
        script = doctor("How long\N{FULLWIDTH QUESTION MARK}")
        async with talking(lambda body, said=said: said, script) as (mesh, _):  # type: ignore[misc]
            with pytest.raises(AssertionError, match="the patient must return JSON"):
                await run(mesh, "consultation", {}, labels={"description": REPORT})


# Two futures of a dialogue --------------------------------------------------------------------------------------------


async def futures(turns_max: int, said: str = "a?<|end|>", **of_lease: Any) -> tuple[LocalMesh, Episode, ChatServer]:
    """Run the agent. Each `?` of the model is a drawn digit, and the reward of a dialogue is its last digit."""
    async with talking(lambda body: "and then", lambda text: said) as (mesh, server):
        mesh.scorer = FixedScorer(lambda text: (Reward(name="r", value=float(text[-1:] or 0)),))
        episode = await run(mesh, "two_futures", {"turns_max": turns_max}, **of_lease)
    return mesh, episode, server


@pytest.mark.row("S110")
async def test_two_futures_share_a_dialogue_and_are_a_pair_with_returns() -> None:
    places = set()
    for number in range(12):
        mesh, episode, server = await futures(3, lease_id=str(number), seed=number)
        one, other = (episode.path_segments(sample) for sample in episode.samples)
        shared = [first for first, second in zip(one, other, strict=True) if first is second]
        assert all(first is second for first, second in zip(one[: len(shared)], other, strict=False))
        assert shared[-1].role is not Role.ACTION, "the dialogue before the turn"
        assert not any(segment.num_trainable for segment in shared)
        for path, sample in zip((one, other), episode.samples, strict=True):
            trained = [n for n, segment in enumerate(path) if segment.num_trainable]
            if sample.trainable:
                assert trained == [len(shared)], "only the turn after it"
            assert [s.role for s in path] == [Role.CONTEXT, *([Role.ACTION, Role.OBSERVATION] * 9)][: len(path)]
            last = mesh.tokenizer.decode(path[-1].token_ids)
            assert [r.value for r in sample.rewards] == [float(last[1])], "the return of this future"
        num_turns = len(one) // 2
        places.add((len(shared) // 2, num_turns))
        assert len(server.requests) == (num_turns - 1) + (num_turns - 1 - len(shared) // 2)
        assert sum(use.calls for use in episode.endpoints) == len(server.requests)
    assert len(places) >= 4, "different turns of dialogues of different lengths"


async def test_equal_turns_are_not_trained_and_evaluations_are_one_dialogue() -> None:
    _, episode, _ = await futures(2, said="a1<|end|>")
    assert [sample.trainable for sample in episode.samples] == [False, False]
    _, episode, server = await futures(4, purpose=types_pb2.PURPOSE_EVAL)
    assert len(episode.samples) == 1
    assert len(server.requests) == 3
    assert "User: 1+2\n\nAssistant: a" in server.requests[0]["messages"][0]["content"]
