"""Masked multiple choice: what becomes a task, where its answer is, and what is rejected."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollmesh.services.data.config import DataConfig, build_pools
from rollmesh.services.data.masked_source import MASK, distinct, is_near_duplicate
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.reward.oracles import Oracles
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.option_order import letter_of_answer, option_order
from rollmesh.shared.domain.trajectory import Message, Reward
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError, UnknownOracle

from ..reward import builders
from ..shared.chat_server import chat_server

SPAN = "so the train has travelled"
DISTRACTORS = [
    "so the bus has stopped",
    "So the train has travelled.",  # the same words as the part
    "because the train is late",
    "Because: the train is late!",  # the same words as an earlier one
    "",
    "and the train turns around",
    "so the track has ended",
]


def passage(number: int) -> str:
    return f"The speed is {number} km/h and two hours have passed, {SPAN} {2 * number} km in all."


def written(body: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"span": SPAN, "distractors": DISTRACTORS, **changes})


async def read(folder: Path, server_url: str, **options: Any) -> list[PoolTask]:
    """Read the source as the data service does."""
    entry = {"kind": "openai", "base_url": server_url, "retry_s": 0.0, "record": "answers", "replay": "answers"}
    table = {name: config_from_dict(EndpointConfig, {**entry, "model": name}) for name in ("writer", "solver")}
    given = {"path": "text.txt", "chars_min": 20, "num_options": 4, "validation_share": 0, "test_share": 0, **options}
    made = config_from_dict(DataConfig, {"source": {"name": "masked", "options": given}})

    def build() -> list[PoolTask]:
        pool = build_pools(made, folder, BlockingEndpoints(table, base_dir=folder))[Split.TRAIN]
        return [pool.task(number) for number in range(len(pool))]

    return await asyncio.to_thread(build)


@pytest.mark.row("S044")
async def test_a_text_file_becomes_multiple_choice_whose_order_is_shuffled(tmp_path: Path) -> None:
    """All clauses: passage, mask, enough options and the answer; a constant letter is right in 1 of k; near-duplicates
    are rejected. The standard deviation of the rate of 100 tasks is sqrt(0.25 * 0.75 / 100) = 0.043."""
    (tmp_path / "text.txt").write_text("\n\n".join(["too short", *map(passage, range(100))]))
    async with chat_server(written) as server:
        tasks = await read(tmp_path, server.url)
    assert await read(tmp_path, "http://127.0.0.1:9") == tasks, "recorded answers need no server"
    assert len(tasks) == 100
    oracles, scorer = Oracles({}), SCORERS.make(Extension("choice"))
    right = dict.fromkeys("ABCD", 0.0)
    for number, task in enumerate(tasks):
        text = task.messages[0].content
        assert f"have passed, {MASK} {2 * number} km in all." in text
        options = dict(re.findall(r"^([A-J])\. (.*)$", text, re.MULTILINE))
        assert sorted(options.values()) == sorted([SPAN, DISTRACTORS[0], DISTRACTORS[2], DISTRACTORS[5]])
        key = oracles.resolve(task.oracle_ref)
        assert key is not None
        assert [options[letter] for letter in key.answers] == [SPAN]
        for letter in right:
            item = replace(
                builders.item(),
                answer_key=key,
                messages=(*task.messages, Message(role="assistant", content=f"<answer>{letter}</answer>")),
            )
            reward = await scorer.score(item)
            assert isinstance(reward, Reward)
            right[letter] += reward.value / len(tasks)
    assert sum(right.values()) == pytest.approx(1.0)
    assert all(rate == pytest.approx(0.25, abs=0.13) for rate in right.values()), right


async def test_the_agent_gets_no_reference_and_another_seed_another_order(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"body": passage(n)}) + "\n" for n in range(8)))
    async with chat_server(written) as server:
        first, second = [
            await read(tmp_path, server.url, path="lines.jsonl", field="body", seed=seed) for seed in (0, 1)
        ]
        assert len(server.requests) == 8, "the order does not depend on the writer"
    letters = [[letter_of_answer(task.oracle_ref.partition(":")[2], 4) for task in tasks] for tasks in (first, second)]
    assert letters[0] != letters[1]
    for task in first:
        assert (task.task_id.partition("-")[0], dict(task.labels)) == ("passage", {})
        assert SPAN not in task.oracle_ref


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"span": "not in the text"}, "unusable_part"),
        ({"span": "h"}, "unusable_part"),
        ({"span": passage(7)}, "unusable_part"),
        ({"span": 3}, "malformed_answer"),
        ({"distractors": DISTRACTORS[:5]}, "few_distractors"),
        ({"distractors": "none"}, "malformed_answer"),
    ],
)
async def test_an_answer_of_the_writer_that_is_not_usable_rejects_its_passage(
    tmp_path: Path, change: dict[str, Any], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "text.txt").write_text(f"{passage(7)}\n\n{passage(8)}")

    def answer(body: dict[str, Any]) -> str:
        return written(body, **change) if passage(7) in body["messages"][0]["content"] else written(body)

    async with chat_server(answer) as server:
        tasks = await read(tmp_path, server.url)
    assert [task.task_id for task in tasks] == ["passage-2"]
    assert f"records dropped: source=passage {cause}=1" in caplog.text


async def test_text_around_the_json_of_the_writer_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(passage(7))
    async with chat_server(lambda body: f"```json\n{written(body)}\n```") as server:
        assert len(await read(tmp_path, server.url)) == 1


async def test_tasks_that_the_solver_always_answers_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(map(passage, range(16))))

    def answer(body: dict[str, Any]) -> str:
        return written(body) if body["model"] == "writer" else "<answer>B</answer>"

    async with chat_server(answer) as server:
        left = await read(tmp_path, server.url, solves=2)
    letters = {letter_of_answer(task.oracle_ref.partition(":")[2], 4) for task in left}
    assert letters == {"A", "C", "D"}


def test_near_duplicates_have_the_same_numbers_and_nearly_the_same_words() -> None:
    assert is_near_duplicate("The speed is 3 m/s.", "the  SPEED is 3 m/s", 0.8)
    assert not is_near_duplicate("The speed is 3 m/s.", "The speed is 4 m/s.", 0.1)
    assert not is_near_duplicate("a b c d", "a b c e", 0.6)  # 3 / 5
    assert is_near_duplicate("a b c d", "a b c e", 0.59)
    assert distinct("1/2", ["0.5", "0.25", ".250"], 0.8) == ["0.25"]
    assert distinct("a", ["b", "B", "?", "a", "c"], 0.8) == ["b", "c"]


def test_an_order_is_a_permutation_and_a_wrong_reference_is_named() -> None:
    assert sorted(option_order("0-ab-9", 9)) == list(range(9))
    for wrong in ("0-ab-1", "0-ab-11", "0-ab-", "x"):
        with pytest.raises(UnknownOracle, match=f"oracle `masked:{wrong}`: must end with the number of options, 2 to"):
            Oracles({}).resolve(f"masked:{wrong}")


async def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*text.txt: No such file"):
        await read(tmp_path, "http://127.0.0.1:9")
