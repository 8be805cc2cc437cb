"""Continuations of raw text before a judge that does not know who wrote them."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.data.config import DataConfig, build_pools
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, Role, Source
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

from ..shared.chat_server import chat_server
from .reward_service import ServicePort, environment

PREFIX = "The sky is "
GIVEN = {"original": "green today.", "rewritten": "blue today."}
QUALITY = {"green today.": 0, "red today.": 1, "blue today.": 2, "blue by day.": 3}


def candidates(body: dict[str, Any]) -> dict[str, str]:
    """Return the texts that the judge gets, by letter."""
    asked: str = body["messages"][0]["content"]
    return dict(re.findall(r"^DATA-\w{16} continuation ([A-Z])\n(.*)$", asked, re.MULTILINE))


def by_quality(body: dict[str, Any]) -> str:
    quality = {
        letter: next(value for known, value in QUALITY.items() if known.startswith(text))
        for letter, text in candidates(body).items()
    }
    return json.dumps({"ranking": sorted(quality, key=lambda letter: -quality[letter])})


async def play(
    server_url: str,
    *episodes: str,
    said: Callable[[str], str],
    purpose: Any = types_pb2.PURPOSE_TRAIN,
    segments_max: int = 1024,
    **options: Any,
) -> tuple[LocalMesh, list[Episode]]:
    """Play episodes with these names, in which the policy says what `said` returns."""
    entry = {"kind": "openai", "base_url": server_url, "model": "m", "retry_s": 0.0}
    endpoints = Endpoints({"judge": config_from_dict(EndpointConfig, entry)})
    limits = LimitsConfig(score_calls_max=1, segments_max=segments_max)
    mesh = LocalMesh(script=said, endpoints=endpoints, config=RolloutConfig(limits=limits), private_extras=GIVEN)
    mesh.scorer = ServicePort([environment("rank"), environment("rollout_won")])  # type: ignore[assignment]
    runner = mesh.runner(load_agent(Extension("continuation", {"rollouts": 2, **options})))
    for name in episodes:
        report = await runner.run(lease([PREFIX], lease_id=name, purpose=purpose))
        assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED, report.failure
    await endpoints.close()
    return mesh, mesh.samples.episodes


def rewards(episode: Episode) -> list[tuple[str, bool, float, float]]:
    """Return role, whether it is trained, `rank` and `rollout_won` of each sample, best first."""
    found = []
    for sample in episode.samples:
        by_name = {reward.name: reward.value for reward in sample.rewards}
        found.append((sample.role, sample.trainable, by_name["rank"], by_name["rollout_won"]))
    return sorted(found, key=lambda one: -one[2])


@pytest.mark.row("S111")
async def test_the_prompt_is_raw_text_and_only_the_best_continuation_is_trained() -> None:
    said = iter(["red today.<|end|>", "blue by day.<|end|>"])
    async with chat_server(by_quality) as server:
        mesh, (episode,) = await play(server.url, "l1", said=lambda text: next(said))
    prompts = [mesh.tokenizer.decode(prompt) for prompt, _, _ in mesh.generator.asked]
    assert prompts == [PREFIX, PREFIX], "without a chat template"
    assert rewards(episode) == [
        ("rollout", True, 1.0, 1.0),
        ("rewritten", False, pytest.approx(2 / 3), 1.0),
        ("rollout", False, pytest.approx(1 / 3), 1.0),
        ("original", False, 0.0, 1.0),
    ]


async def test_a_given_continuation_that_is_best_is_trained_as_external_tokens() -> None:
    async with chat_server(by_quality) as server:
        mesh, (episode,) = await play(server.url, "l1", said=lambda text: "red today.<|end|>", tokens=6)
        assert sorted(candidates(server.requests[0]).values()) == ["blue t", "green ", "red to", "red to"]
    (trained,) = [sample for sample in episode.samples if sample.trainable]
    segment = episode.segments[trained.leaf]
    assert (trained.role, segment.role, segment.source) == ("rewritten", Role.ACTION, Source.DATASET)
    assert (mesh.tokenizer.decode(segment.token_ids), segment.num_trainable) == ("blue t", 6)
    assert {won for _, _, _, won in rewards(episode)} == {0.0}


@pytest.mark.row("S111")
async def test_the_judge_does_not_learn_who_wrote_a_continuation() -> None:
    """Each candidate has each of four letters in about a quarter of 60 episodes, deviation sqrt(60 * 3) / 4."""
    said = iter(["red today.<|end|>", "blue by day.<|end|>"] * 60)
    async with chat_server(by_quality) as server:
        await play(server.url, *map(str, range(60)), said=lambda text: next(said))
        shown = [candidates(body) for body in server.requests]
        texts = [body["messages"][0]["content"] for body in server.requests]
    places = Counter((letter, text) for one in shown for letter, text in one.items())
    assert len(places) == 16
    assert all(abs(count - 15) < 4 * 3.36 for count in places.values()), places
    assert not any(word in text for text in texts for word in ("original", "rewritten", "rollout", "policy", "sample"))


@pytest.mark.row("S111")
async def test_the_share_of_wins_by_rollouts_rises_as_the_best_continuations_are_trained() -> None:
    """A policy over four texts takes steps on - log pi(best), which is the loss of the recipe."""
    logits, rng = dict.fromkeys(QUALITY, 0.0), random.Random(0)
    logits["green today."] = 5.0

    def said(text: str) -> str:
        return f"{rng.choices(list(logits), list(softmax(logits).values()))[0]}<|end|>"

    async def num_wins(server_url: str) -> float:
        names = [f"eval-{number}" for number in range(10)]
        _, played = await play(server_url, *names, said=said, purpose=types_pb2.PURPOSE_EVAL)
        return sum(rewards(episode)[0][3] for episode in played)

    async with chat_server(by_quality) as server:
        before = await num_wins(server.url)
        for step in range(30):
            mesh, (episode,) = await play(server.url, str(step), said=said)
            (trained,) = [sample for sample in episode.samples if sample.trainable]
            best = mesh.tokenizer.decode(episode.segments[trained.leaf].token_ids).removesuffix("<|end|>")
            probs = softmax(logits)
            for text in logits:
                logits[text] += 0.5 * ((text == best) - probs[text])
        after = await num_wins(server.url)
    assert before <= 2 < before + 3 <= after, (before, after)


def softmax(logits: dict[str, float]) -> dict[str, float]:
    total = sum(map(math.exp, logits.values()))
    return {text: math.exp(logit) / total for text, logit in logits.items()}


async def test_an_evaluation_compares_with_given_continuations_and_records_none() -> None:
    async with chat_server(by_quality) as server:
        _, (episode,) = await play(
            server.url, "l1", said=lambda text: "blue by day.<|end|>", purpose=types_pb2.PURPOSE_EVAL, rollouts=1
        )
        assert sorted(candidates(server.requests[0]).values()) == ["blue by day.", "blue today.", "green today."]
    assert rewards(episode) == [("rollout", True, 1.0, 1.0)]
    assert all(segment.source is not Source.DATASET for segment in episode.segments)


@pytest.mark.parametrize("answer", ['{"ranking": ["A", "B", "C", "C"]}', '{"ranking": "ABCD"}', '["A"]', "best: A"])
async def test_a_judge_that_does_not_rank_is_an_infra_failure(answer: str) -> None:
    async with chat_server(lambda body: answer) as server:
        with pytest.raises(AssertionError, match=r"has each of A, B, C, D once|JSON"):
            await play(server.url, "l1", said=lambda text: "red today.<|end|>")


@pytest.mark.parametrize("limits", [{"turns_max": 1}, {"tokens_max": 14}, {"run_s_max": 5.0}], ids=str)
async def test_a_limit_before_the_ranking_trains_nothing(limits: dict[str, Any]) -> None:
    clock = ManualClock()
    mesh = LocalMesh(
        script=lambda text: "red today.<|end|>",
        config=RolloutConfig(limits=config_from_dict(LimitsConfig, limits)),
        clock=clock,
        private_extras=GIVEN,
    )
    mesh.scorer = ServicePort([environment("rank"), environment("rollout_won")])  # type: ignore[assignment]
    mesh.generator.gate.passes_max = 2
    running = asyncio.ensure_future(mesh.runner(load_agent(Extension("continuation"))).run(lease([PREFIX])))
    while not running.done() and not mesh.generator.gate.held:  # noqa: ASYNC110 - the gate has no event
        await asyncio.sleep(0)
    clock.advance(6.0)
    report = await running
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    assert {role for role, *_ in rewards(episode)} == {"rollout"}
    assert {one[1:] for one in rewards(episode)} == {(False, 0.0, 0.0)}


@pytest.mark.parametrize("segments_max", [5, 6])
async def test_a_limit_at_a_given_continuation_trains_nothing(segments_max: int) -> None:
    async with chat_server(by_quality) as server:
        _, (episode,) = await play(server.url, "l1", said=lambda text: "red today.<|end|>", segments_max=segments_max)
    assert server.requests, "the judge has ranked"
    assert {one[1:] for one in rewards(episode)} == {(False, 0.0, 0.0)}


# The source -----------------------------------------------------------------------------------------------------------


async def read(folder: Path, server_url: str, **options: Any) -> list[PoolTask]:
    entry = {"kind": "openai", "base_url": server_url, "model": "m", "retry_s": 0.0, "replay": "r", "record": "r"}
    table = {"rewriter": config_from_dict(EndpointConfig, entry)}
    given = {"path": "text.txt", "chars_min": 0, "validation_share": 0, "test_share": 0, **options}
    made = config_from_dict(DataConfig, {"source": {"name": "raw_text", "options": given}})

    def build() -> Iterator[PoolTask]:
        pool = build_pools(made, folder, BlockingEndpoints(table, base_dir=folder))[Split.TRAIN]
        return iter([pool.task(number) for number in range(len(pool))])

    return list(await asyncio.to_thread(build))


async def test_a_passage_is_cut_before_a_word_and_its_rest_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The sky is green today.\n\n \n\nOneword\n\nGrass is blue now.")

    def rewritten(body: dict[str, Any]) -> str:
        return "blue today." if "green today." in body["messages"][0]["content"] else "blue now."

    async with chat_server(rewritten) as server:
        tasks = await read(tmp_path, server.url, rewriter="rewriter", prefix_share=0.4)
    assert [(task.messages[0].content, dict(task.private_extras)) for task in tasks] == [
        ("The sky is", {"original": " green today.", "rewritten": " blue today."}),
        ("Grass is", {"original": " blue now.", "rewritten": None}),  # the same text again is not a candidate
    ]
    assert {(task.oracle_ref, len(task.labels), len(task.extras)) for task in tasks} == {("", 0, 0)}


async def test_without_a_rewriter_none_is_asked_and_a_file_without_passages_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The sky is green today.")
    (task,) = await read(tmp_path, "http://127.0.0.1:9")
    assert dict(task.private_extras) == {"original": " green today.", "rewritten": None}
    with pytest.raises(ConfigError, match="no task is in the train split"):
        await read(tmp_path, "http://127.0.0.1:9", chars_min=100)
