"""Agents that talk with other models over several turns: a patient, a user, and models of different prices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig, SamplingConfig
from rollmesh.shared.clock import Clock, ManualClock, SystemClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, FinishReason, Outcome, Reward, Role
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.testing.rollout import FixedPrivateData, FixedScorer, LocalMesh, lease
from rollmesh.trainer.recipe import find_recipe, read_recipe
from rollmesh.v1 import coordinator_pb2, types_pb2

from ..shared.chat_server import ChatServer, chat_server
from .reward_service import ServicePort, environment
from .scored_items import items_of

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
Respond = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def talking(
    respond: Respond,
    script: Callable[[str], str],
    *scorers: Mapping[str, Any],
    sampling: SamplingConfig | None = None,
    clock: Clock | None = None,
    prices: Mapping[str, float] | None = None,
) -> AsyncIterator[tuple[LocalMesh, ChatServer]]:
    """A mesh whose endpoints are one server; those of `prices` cost so much per million tokens."""
    async with chat_server(respond) as server:
        table = {
            name: config_from_dict(
                EndpointConfig,
                {"kind": "openai", "base_url": server.url, "model": name, "retry_s": 0.0, "price_completion": price},
            )
            for name, price in {"patient": 0.0, "user": 0.0, **(prices or {})}.items()
        }
        limits = LimitsConfig(context_tokens_max=8192)
        config = RolloutConfig(limits=limits, sampling=sampling or SamplingConfig())
        mesh = LocalMesh(
            script=script,
            endpoints=Endpoints(table),
            config=config,
            clock=clock or SystemClock(),
            private_extras={"description": REPORT},
        )
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
        episode = await run(mesh, "consultation", {"turns_min": 5, "turns_max": 5, **options})
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


def with_one_answer(body: dict[str, Any]) -> str:
    return json.dumps({"status": "answered", "answer": "Two weeks."})


LONG = f"How long{'x' * 60}\N{FULLWIDTH QUESTION MARK}"


async def test_a_turn_that_its_token_limit_cuts_ends_the_consultation() -> None:
    async with talking(
        with_one_answer,
        doctor("How long\N{FULLWIDTH QUESTION MARK}", LONG),
        environment("inquiry", min=-25, max=10),
        sampling=SamplingConfig(max_tokens=32),
    ) as (mesh, _):
        episode = await run(mesh, "consultation", {"turns_min": 5, "turns_max": 5})
    (sample,) = episode.samples
    assert [reward.value for reward in sample.rewards] == [1.0 - 5.0]
    assert episode.path_segments(sample)[-1].finish is FinishReason.LENGTH


async def test_the_patient_has_the_report_in_an_evaluation_and_no_label_gives_it() -> None:
    script = doctor("How long\N{FULLWIDTH QUESTION MARK}", "Diagnosis: a cold")
    async with talking(with_one_answer, script, environment("inquiry", min=-25, max=10)) as (mesh, server):
        await run(mesh, "consultation", {}, purpose=types_pb2.PURPOSE_EVAL)
        assert REPORT in server.requests[0]["messages"][0]["content"]
        mesh.data = FixedPrivateData({})
        with pytest.raises(AssertionError, match="no private extra `description`; .*remove the label `description`"):
            await run(mesh, "consultation", {}, labels={"description": REPORT}, lease_id="labelled")


async def test_the_time_limit_counts_as_a_last_turn_without_a_diagnosis() -> None:
    clock = ManualClock()
    async with talking(with_one_answer, doctor(*[LONG] * 5), environment("inquiry", min=-25, max=10), clock=clock) as (
        mesh,
        _,
    ):
        gate = mesh.generator.gate
        gate.passes_max = 1  # the first turn is one piece, and the second one waits
        running = asyncio.ensure_future(run(mesh, "consultation", {"turns_min": 5, "turns_max": 5}))
        while not running.done() and not gate.held:  # noqa: ASYNC110 - the gate has no event
            await asyncio.sleep(0)
        clock.advance(mesh.config.limits.run_s_max + 1)
        episode = await running
    assert [[reward.value for reward in sample.rewards] for sample in episode.samples] == [[1.0 - 5.0]]


async def test_a_patient_that_answers_nonsense_is_an_infra_failure() -> None:
    for answer in ({"status": "odd"}, {"status": "answered", "answer": ""}, ["answered"]):
        said = json.dumps(answer)
        script = doctor("How long\N{FULLWIDTH QUESTION MARK}")
        async with talking(lambda body, said=said: said, script) as (mesh, _):  # type: ignore[misc]
            with pytest.raises(AssertionError, match="the patient must return JSON"):
                await run(mesh, "consultation", {})


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


async def test_a_dialogue_ends_with_a_turn_that_its_token_limit_cuts() -> None:
    """At the first turn of a future the other one continues, and before it nothing is trained."""
    roles = set()
    for number in range(8):
        async with talking(lambda body: "and then", lambda text: "a?" * 9, sampling=SamplingConfig(max_tokens=4)) as (
            mesh,
            server,
        ):
            episode = await run(mesh, "two_futures", {"turns_max": 3}, lease_id=str(number), seed=number)
        assert not server.requests
        assert all(s.role is not Role.OBSERVATION for s in episode.segments)
        roles.add(tuple(sample.trainable for sample in episode.samples))
    assert roles == {(False,), (True, True)}


async def test_the_user_reads_no_system_message() -> None:
    async with talking(lambda body: "and then", lambda text: "a?<|end|>") as (mesh, server):
        asked = lease(purpose=types_pb2.PURPOSE_EVAL)
        asked.task.messages.insert(0, types_pb2.Message(role="system", content="be brief"))
        await mesh.runner(load_agent(Extension("two_futures", {"turns_max": 2}))).run(asked)
        (request,) = server.requests
    assert "be brief" not in request["messages"][0]["content"]
    assert "User: 1+2\n\nAssistant: a" in request["messages"][0]["content"]


async def test_equal_turns_are_not_trained_and_evaluations_are_one_dialogue() -> None:
    _, episode, _ = await futures(2, said="a1<|end|>")
    assert [sample.trainable for sample in episode.samples] == [False, False]
    _, episode, server = await futures(4, purpose=types_pb2.PURPOSE_EVAL)
    assert len(episode.samples) == 1
    assert len(server.requests) == 3
    assert "User: 1+2\n\nAssistant: a" in server.requests[0]["messages"][0]["content"]


# Models of different prices -------------------------------------------------------------------------------------------

PRICES = {"cheap": 500.0, "dear": 5000.0}
"""Per million tokens; an answer of the server has two."""
PLAYS = {
    "direct": ["<answer>A</answer><|end|>"],
    "cheap": ["hm <search>Cheap: which letter</search>", "<answer>A</answer><|end|>"],
    "dear": ["<search>dear: which letter</search>", "<answer>A</answer><|end|>"],
    "malformed": ["<search>dear: which letter</search>", "A<|end|>"],
}


async def routed(turns: list[str], **options: Any) -> tuple[LocalMesh, Episode, ChatServer]:
    def script(text: str) -> str:
        return turns[text.count("</information>")]

    async with talking(lambda body: f"{body['model']} says B", script, prices=PRICES) as (mesh, server):
        episode = await run(mesh, "router", options, messages=["Which letter?"])
    return mesh, episode, server


async def reward_of(mesh: LocalMesh, episode: Episode, key: str, cost_weight: float) -> float:
    """The reward of the recipe, with the answer key `key`."""
    _, settings = read_recipe(find_recipe("router_r1"))
    scorers = [dict(scorer) for scorer in settings["reward"]["scorers"]]
    scorers[-1]["options"] |= {"cost_weight": cost_weight}
    engine = build_engine(config_from_dict(RewardConfig, {"scorers": scorers}))
    (item,) = items_of(mesh.scorer.items[-1], answers=[key])
    (rewards,) = await engine.score([replace(item, endpoints=episode.endpoints)])
    await engine.close()
    assert all(reward.outcome is Outcome.OK for reward in rewards), rewards
    return next(reward.value for reward in rewards if reward.name == "routed")


@pytest.mark.row("S093")
async def test_the_model_asks_a_priced_model_in_its_text_and_goes_on() -> None:
    mesh, episode, server = await routed(PLAYS["cheap"])
    assert [(r["model"], r["messages"][0]["content"]) for r in server.requests] == [("cheap", "which letter")]
    (sample,) = episode.samples
    path = episode.path_segments(sample)
    text = mesh.tokenizer.decode(np.concatenate([segment.token_ids for segment in path]))
    assert text.endswith(
        "<|assistant|>hm <search>Cheap: which letter</search>\n\n<information>cheap says B</information>\n\n"
        "<answer>A</answer><|end|>"
    )
    assert [segment.num_trainable > 0 for segment in path] == [False, True, False, True]
    (use,) = episode.endpoints
    assert use.endpoint == "cheap"
    assert use.price == pytest.approx(0.001)


async def test_a_tag_is_read_if_its_last_token_has_white_space_after_it() -> None:
    _, _, server = await routed(["<search>cheap: which letter</search>\n\n", "<answer>A</answer><|end|>"])
    assert len(server.requests) == 1


@pytest.mark.parametrize("asked", ["other: which letter", "cheap", "cheap: ", "llm-name: your query"])
async def test_a_model_or_question_that_does_not_exist_costs_nothing(asked: str) -> None:
    _, episode, server = await routed([f"<search>{asked}</search>", "<answer>A</answer><|end|>"])
    assert not server.requests
    shown = [message.content for segment in episode.segments for message in segment.messages if message.role == "tool"]
    assert shown == ["None"]


async def test_the_models_are_described_and_must_exist() -> None:
    described = {"cheap": "small and fast", "dear": "large"}
    mesh, episode, _ = await routed(PLAYS["direct"], models=described)
    prompt = mesh.tokenizer.decode(episode.path_segments(episode.samples[0])[0].token_ids)
    assert "Models:\ncheap: small and fast\ndear: large\n\nWhich letter?" in prompt
    with pytest.raises(AssertionError, match="names other, which the table `endpoints` does not have"):
        await routed(PLAYS["direct"], models={"other": ""})
    _, _, server = await routed(["<search>cheap: again</search>"] * 3, asks_max=2)
    assert len(server.requests) == 2


@pytest.mark.row("S093")
@pytest.mark.parametrize(
    ("turns", "is_right"),
    [
        (PLAYS["direct"], True),
        (PLAYS["cheap"], True),
        (PLAYS["malformed"], False),
        (["A<|end|>"], False),
        (["<answer>A</answer> and more<|end|>"], False),
        (["<answer>A</answer><answer>A</answer><|end|>"], False),
        (["<search>cheap</search>", "<answer>A</answer><|end|>"], False),
        (["</search><answer>A</answer><|end|>"], False),
    ],
)
async def test_malformed_output_never_earns_the_reward_of_a_low_price(turns: list[str], is_right: bool) -> None:
    mesh, episode, _ = await routed(turns)
    for cost_weight in (0.0, 0.5, 1.0):
        reward = await reward_of(mesh, episode, "A", cost_weight)
        assert (reward > 0) if is_right else reward == -1


@pytest.mark.row("S093")
async def test_a_larger_weight_of_the_cost_lowers_the_mean_price_of_a_trained_router() -> None:
    """A policy over four episodes, whose answers are right with 0.3 without help, 0.6 with the cheap model and 0.9 with
    the dear one, is trained by the exact gradient of the reward of the recipe."""
    success = np.array([0.3, 0.6, 0.9, 0.9])
    played = [await routed(turns) for turns in PLAYS.values()]
    price = np.array([sum(use.price for use in episode.endpoints) for _, episode, _ in played])
    assert price.tolist() == pytest.approx([0.0, 0.001, 0.01, 0.01])
    prices = []
    for cost_weight in (0.0, 0.5, 0.9):
        right, wrong = [
            np.array([await reward_of(mesh, episode, key, cost_weight) for mesh, episode, _ in played]) for key in "AZ"
        ]
        reward = success * right + (1 - success) * wrong
        logits = np.zeros(4)
        for _ in range(300):
            p = np.exp(logits - logits.max())
            p /= p.sum()
            logits += p * (reward - p @ reward)
        prices.append(float(p @ price))
        assert p[3] < 0.05, "malformed"
    assert prices == sorted(prices, reverse=True)
    assert prices[0] > 0.008
    assert prices[-1] < 0.003
