"""Stored trajectories that are cut into prompts: which, where, with which labels, and with swapped public tests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import pvariance
from typing import Any

import pytest

from rollmesh.app.samples.samples import MessageLine, RewardLine, SampleLine, SegmentLine, encode_sample_line
from rollmesh.services.data.config import DataConfig, build_pools
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.data.trajectory_source import greatest_variance, perturbed
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.store.records import RecordError

PROMPT = "Double the number.\nin: 1 out: 2\nin: 3 out: 6\n"


def sample(task: str, number: int, rates: Sequence[float | None], *, tokens: int = 10, **changes: Any) -> bytes:
    """Return a line as `rollmesh rollout --out` writes it, whose turns have these rewards, and two segments each."""
    messages = [MessageLine(role="user", content=PROMPT)]
    segments = [SegmentLine(role="context", source="prompt", token_ids=[1] * tokens, index=0)]
    rewards = [RewardLine(name="tests_share", value=0.5)]
    for turn, rate in enumerate(rates):
        messages.append(MessageLine(role="assistant", content=f"code {number}.{turn}"))
        for finish in ("unfinished", "stop"):
            place = len(segments)
            segments.append(SegmentLine(role="action", source="policy", token_ids=[2], index=place, finish=finish))
        if rate is not None:
            rewards.append(RewardLine(name="tests_share", value=rate, segment=place))
        if turn + 1 < len(rates):
            messages.append(MessageLine(role="tool", content="in: 1 out: 2 failed"))
            segments.append(SegmentLine(role="observation", source="tool", token_ids=[3] * tokens, index=place + 1))
    return encode_sample_line(
        SampleLine(
            sample_id=f"g{number}.0-0",
            episode=f"g{number}.0",
            group=f"g{number}",
            run="r",
            task=task,
            oracle_ref="tests:ref",
            labels={"level": "3"},
            messages=messages,
            rewards=rewards,
            segments=segments,
            **changes,
        )
    )


def read(folder: Path, lines: Sequence[bytes], **options: Any) -> dict[str, PoolTask]:
    (folder / "samples.jsonl").write_bytes(b"".join(lines))
    source = {"name": "trajectories", "options": {"path": "samples.jsonl", **options}}
    pool = build_pools(config_from_dict(DataConfig, {"source": source}), folder)[Split.TRAIN]
    return {pool.task(n).task_id: pool.task(n) for n in range(len(pool))}


@pytest.mark.row("S072")
def test_a_trajectory_is_cut_at_a_turn_into_a_prompt(tmp_path: Path) -> None:
    found = read(tmp_path, [sample("t", 1, [0.25, 0.75, 1.0]), sample("t", 2, [0.5, 0.5, 0.5])])
    assert list(found) == ["t-turn-0", "t-g1.0-0-turn-1", "t-g1.0-0-turn-2"], "equal rates have no spread"
    assert {name: dict(task.labels) for name, task in found.items()} == {
        "t-turn-0": {"level": "3", "turn": "0", "best": "0.0"},
        "t-g1.0-0-turn-1": {"level": "3", "turn": "1", "best": "0.25"},
        "t-g1.0-0-turn-2": {"level": "3", "turn": "2", "best": "0.75"},
    }
    shown = [(message.role, message.content) for message in found["t-g1.0-0-turn-2"].messages]
    failed = ("tool", "in: 1 out: 2 failed")
    assert shown == [("user", PROMPT), ("assistant", "code 1.0"), failed, ("assistant", "code 1.1"), failed]
    assert {task.oracle_ref for task in found.values()} == {"tests:ref"}


def test_at_most_so_many_samples_of_a_task_are_cut_by_the_variance_of_their_spreads(tmp_path: Path) -> None:
    spreads = [0.1, 0.9, 0.2, 1.0, 0.5]
    lines = [sample("t", number, [1 - spread, 1.0]) for number, spread in enumerate(spreads)]
    cut = {name.split("-")[1] for name in read(tmp_path, lines, first=False)}
    assert cut == {"g0.0", "g1.0", "g2.0", "g3.0"}
    cut = {name.split("-")[1] for name in read(tmp_path, [*lines, sample("u", 9, [0.0, 0.5])], first=False, per_task=2)}
    assert cut == {"g0.0", "g3.0"}, "no turn of the sample of u passes all tests"
    assert "u-g9.0-0-turn-1" in read(tmp_path, [sample("u", 9, [0.0, 0.5])], solved=False)


def test_a_choice_of_smallest_and_largest_values_has_the_greatest_variance_of_all() -> None:
    values = [0.3, 0.1, 0.8, 0.85, 0.2, 0.9, 0.15]
    for num in range(1, 8):
        chosen = greatest_variance(values, num)
        best = max(pvariance([values[place] for place in choice]) for choice in combinations(range(7), num))
        assert pvariance([values[place] for place in chosen]) == pytest.approx(best)
        assert len(set(chosen)) == num


def test_cutting_ends_after_two_passes_and_beyond_the_longest_prompt(tmp_path: Path) -> None:
    found = read(tmp_path, [sample("t", 1, [0.0, 1.0, 1.0, 1.0])], first=False)
    assert list(found) == ["t-g1.0-0-turn-1", "t-g1.0-0-turn-2"]
    # Before turn 1 are 10 + 2 + 10 tokens, before turn 2 are 12 more.
    line = sample("t", 1, [0.0, 0.5, 1.0])
    assert len(read(tmp_path, [line], tokens_max=34)) == 3
    assert list(read(tmp_path, [line], tokens_max=33)) == ["t-turn-0", "t-g1.0-0-turn-1"]


def test_a_task_that_every_sample_solves_at_once_is_no_prompt(tmp_path: Path) -> None:
    solved = [sample("easy", 1, [1.0]), sample("easy", 2, [1.0, 1.0])]
    assert list(read(tmp_path, [*solved, sample("t", 3, [0.0])])) == ["t-turn-0"]


def test_a_perturbed_copy_has_swapped_outputs_in_the_prompt_and_not_in_the_turns(tmp_path: Path) -> None:
    lines = [sample("t", 1, [0.25, 1.0])]
    found = read(tmp_path, lines, public=r"in: (?P<input>\d+) out: (?P<output>\d+)")
    assert list(found) == ["t-turn-0", "t-turn-0-perturbed", "t-g1.0-0-turn-1", "t-g1.0-0-turn-1-perturbed"]
    task = found["t-g1.0-0-turn-1-perturbed"]
    assert json.loads(task.labels["wrong_tests"]) == [["1", "6"], ["3", "2"]]
    said = [message.content for message in task.messages]
    assert said == ["Double the number.\nin: 1 out: 6\nin: 3 out: 2\n", "code 1.0", "in: 1 out: 6 failed"]
    assert "wrong_tests" not in found["t-g1.0-0-turn-1"].labels


def test_tests_with_one_output_are_not_perturbed_and_other_tests_stay() -> None:
    public = re.compile(r"(?P<input>\d)->(?P<output>\d)")
    same = [Message(role="user", content="1->2 3->2"), Message(role="assistant", content="5->6")]
    assert perturbed(same, public) == (tuple(same), ())
    (changed,), wrong = perturbed([Message(role="user", content="1->2 3->2 4->7 5->8")], public)
    assert (changed.content, wrong) == ("1->7 3->2 4->2 5->8", (("1", "7"), ("4", "2")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"task": "t"}\n', r"samples.jsonl:1: not a sample of `rollmesh rollout --out`: .*sample_id"),
        (sample("t", 1, [0.0, None]), "must have the reward `tests_share` of each turn, got: turn 1 of 2 has none"),
        (sample("t", 1, [0.0], split="dev"), 'field "split": must be one of train, validation, test, got .dev.'),
        (sample("t", 1, []), "got: 0 turns, 0 messages; set `per: turn`"),
    ],
)
def test_a_sample_that_cannot_be_cut_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read(tmp_path, [line])
