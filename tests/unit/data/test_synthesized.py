"""Synthesized questions: what is asked, which questions are admitted, and that later starts give the same tasks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.data.config import DataConfig, build_pools
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.reward.oracles import AnswerFileConfig, JsonlOracle
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.records import RecordError

from ..shared.chat_server import chat_server

LINES: list[dict[str, Any]] = [
    {"question": "Which city is the capital of France?", "answer": "Paris", "facts": ["France has the Loire."]},
    {"question": "Who designed the engine in 1837?", "answer": ["Babbage", "Charles Babbage"]},
    {"question": "Easy?", "answer": "Yes it is"},
    {"question": "Not rewritten?", "answer": "No"},
    {"question": "Rejected?", "answer": "R"},
    {"question": "Held out?", "answer": "H", "split": "test"},
]
HARDER = {
    "Which city is the capital of France?": "Which city is the capital of the country with the Loire?",
    "Which city is the capital of the country with the Loire?": "Which city is Paris?",  # contains the answer
    "Who designed the engine in 1837?": "Who designed the engine before 1850?",
    "Easy?": "Is it easy?",
    "Not rewritten?": "",
    "Rejected?": "Another question?",
}


def model(body: dict[str, Any]) -> str:
    """Write, check and solve by a table."""
    asked: str = body["messages"][0]["content"]
    if body["model"] == "writer":
        question = asked.partition("Question: ")[2].splitlines()[0]
        return HARDER.get(question, question)
    if body["model"] == "checker":
        return "No, others fit." if "Another question?" in asked else "Yes."
    return "yes it is." if "Is it easy?" in asked else "London"


async def tasks(folder: Path, server_url: str, **options: Any) -> dict[str, PoolTask]:
    """Read the source as the data service does; return its tasks by id."""
    (folder / "seeds.jsonl").write_text("".join(json.dumps({"split": "train", **line}) + "\n" for line in LINES))
    entry = {"kind": "openai", "base_url": server_url, "retry_s": 0.0, "record": "answers", "replay": "answers"}
    table = {n: config_from_dict(EndpointConfig, {**entry, "model": n}) for n in ("writer", "checker", "solver")}
    source = {"name": "synthesized", "options": {"path": "seeds.jsonl", "split": "split", **options}}

    def read() -> dict[str, PoolTask]:
        made = config_from_dict(DataConfig, {"source": source})
        pools = build_pools(made, folder, BlockingEndpoints(table, base_dir=folder))
        found = [pool.task(n) for pool in pools.values() for n in range(len(pool))]
        return {task.task_id: task for task in found}

    return await asyncio.to_thread(read)


@pytest.mark.row("S014")
async def test_questions_that_stay_right_and_hard_are_admitted(tmp_path: Path) -> None:
    async with chat_server(model) as server:
        found = await tasks(tmp_path, server.url)
        asked = [body["messages"][0]["content"] for body in server.requests]
    texts = {name: task.messages[-1].content for name, task in found.items()}
    assert texts == {
        "tasks-1-synthesized": "Which city is the capital of the country with the Loire?",
        "tasks-2-synthesized": "Who designed the engine before 1850?",
        "tasks-6": "Held out?",
    }
    assert found["tasks-6"].split is Split.TEST
    assert any("Fact: France has the Loire." in text and text.startswith("Rewrite") for text in asked)
    checks = [text for text in asked if text.startswith("The first question has the answer Paris.")]
    assert len(checks) == 1, "a question that contains its answer is not checked"
    assert any("Babbage or Charles Babbage" in text for text in asked)
    again = await tasks(tmp_path, "http://127.0.0.1:9")  # recorded answers need no server
    assert again == found


async def test_the_answer_is_that_of_the_line_and_only_the_reward_service_has_it(tmp_path: Path) -> None:
    async with chat_server(model) as server:
        found = await tasks(tmp_path, server.url)
    task = found["tasks-2-synthesized"]
    scheme, _, rest = task.oracle_ref.partition(":")
    assert scheme == "jsonl"
    oracle = JsonlOracle({"tasks": config_from_dict(AnswerFileConfig, {"path": "seeds.jsonl"})}, tmp_path)
    assert oracle.resolve(rest).answers == ("Babbage", "Charles Babbage")
    assert "Babbage" not in repr(task)


async def test_without_answers_of_a_solver_easy_questions_stay(tmp_path: Path) -> None:
    async with chat_server(model) as server:
        found = await tasks(tmp_path, server.url, solves=0, rounds=1)
    assert found["tasks-3-synthesized"].messages[-1].content == "Is it easy?"


async def test_the_field_of_facts_may_be_nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINES[0], "about", {"facts": LINES[0]["facts"]})
    monkeypatch.delitem(LINES[0], "facts")
    async with chat_server(model) as server:
        await tasks(tmp_path, server.url, facts="about.facts")
        asked = [body["messages"][0]["content"] for body in server.requests]
    assert any("Fact: France has the Loire." in text for text in asked)


async def test_facts_that_are_not_texts_are_reported_with_their_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINES[0], "facts", "one")
    with pytest.raises((RecordError, ConfigError), match=r"seeds.jsonl:1.*facts.*list of non-empty strings"):
        await tasks(tmp_path, "http://127.0.0.1:9")
