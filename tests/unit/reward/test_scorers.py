"""The built-in scorers: values computed by hand, and evidence without the key."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.services.reward.item import TEXT_CHARS_MAX, JudgedSegment, ScoreItem
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.reward.scorers import extract
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import FinishReason, Outcome, Reward, Role, Source, ToolOutcome
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.records import last_match

from .builders import item


async def score(
    name: str, options: dict[str, Any], *said: str, answer: str | None = "42", num_tokens: int = 10
) -> Reward:
    reward = await SCORERS.make(Extension(name, options)).score(item(*said, answer=answer, num_tokens=num_tokens))
    assert isinstance(reward, Reward)
    return reward


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("<answer>42</answer>", 1.0),
        ("so <answer> 42\n</answer>.", 1.0),
        ("<answer>41</answer> no, <answer>42</answer>", 1.0),
        ("<answer>42</answer> no, <answer>41</answer>", 0.0),
        ("<answer>42.0</answer>", 0.0),
        ("42", 0.0),
        ("", 0.0),
    ],
)
async def test_exact_compares_the_last_tagged_answer(said: str, value: float) -> None:
    assert (await score("exact", {}, said)).value == value


async def test_exact_reads_assistant_messages_only_and_the_last_one_by_default() -> None:
    assert (await score("exact", {}, "<answer>42</answer>", "done")).value == 0.0
    assert (await score("exact", {"where": "episode"}, "<answer>42</answer>", "done")).value == 1.0
    assert (await score("exact", {}, answer="tool")).value == 0.0


async def test_exact_takes_another_answer_format_by_config() -> None:
    options = {"pattern": r"####\s*(\S+)", "ignore_chars": "$,"}
    assert (await score("exact", options, "12*100\n#### $1,200", answer="1200")).value == 1.0
    assert (await score("exact", {"pattern": "", "ignore_case": True}, " PARIS ", answer="Paris")).value == 1.0


async def test_exact_without_a_key_does_not_apply() -> None:
    assert (await score("exact", {}, "<answer>1</answer>", answer=None)).outcome is Outcome.NOT_APPLICABLE


async def test_exact_shows_the_models_answer_and_never_the_key() -> None:
    reward = await score("exact", {}, "<answer>7</answer>", answer="Zanzibar")
    assert "'7'" in reward.evidence
    assert "Zanzibar" not in reward.evidence


async def test_patterns_see_the_end_of_a_text_beyond_the_limit() -> None:
    assert (await score("exact", {}, "x" * TEXT_CHARS_MAX + "<answer>42</answer>")).value == 1.0
    assert (await score("exact", {}, "<answer>42</answer>" + "x" * TEXT_CHARS_MAX)).value == 0.0


@pytest.mark.parametrize(
    ("options", "said", "value"),
    [
        ({}, ["<answer>4</answer>"], 1.0),
        ({}, ["so <answer>4</answer>"], 0.0),
        ({"whole": False}, ["so <answer>4</answer>"], 1.0),
        ({"pattern": "call.*<answer>", "where": "episode", "whole": False}, ["call", "<answer>"], 1.0),
        ({"pattern": "call.*<answer>", "whole": False}, ["call", "<answer>"], 0.0),
    ],
)
async def test_format_matches_the_last_message_or_the_episode(
    options: dict[str, Any], said: list[str], value: float
) -> None:
    assert (await score("format", options, *said)).value == value


async def test_length_budget_and_linear_values() -> None:
    assert (await score("length", {"budget_tokens": 10}, num_tokens=10)).value == 1.0
    assert (await score("length", {"budget_tokens": 10}, num_tokens=11)).value == 0.0
    assert (await score("length", {"form": "linear", "scale_tokens": 8}, num_tokens=20)).value == -2.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact", {"pattern": "("}, "`pattern` must be a regular expression"),
        ("exact", {"patern": "x"}, "options of scorer `exact`.*patern.*did you mean `pattern`"),
        ("format", {"pattern": ""}, "pattern"),
        ("length", {"scale_tokens": 0}, "scale_tokens"),
        ("length", {"form": "cubic"}, "form"),
        ("math", {"num_workers": 0}, "num_workers"),
        ("math", {"compare_s_max": -1}, "compare_s_max"),
        ("environment", {}, "max|min"),
        ("environment", {"min": 0}, "max"),
        ("environment", {"min": 1, "max": 0}, "`min` must be <= max = 0, got 1"),
        ("environment", {"min": 0, "max": 1e31}, r"`max` must be in \[-1e\+30, 1e\+30\], got 1e\+31"),
        ("environment", {"min": float("nan"), "max": 1}, "`min` must be finite, got nan"),
        ("environment", {"min": 0, "max": 1, "at_limit": 2}, r"`at_limit` must be in \[0, 1\], got 2"),
        ("environment", {"min": 0, "max": 1, "per": "token"}, "per"),
        ("exakt", {}, "no scorer `exakt`; known: exact, math, format, length"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SCORERS.make(Extension(name, options))


def conversation(*turns: tuple[str, str]) -> ScoreItem:
    """Return an item with these (text of the model, result of a tool); each turn has two segments. No result: the model
    was not answered."""
    path = [JudgedSegment(index=4, role=Role.CONTEXT, source=Source.PROMPT, token_ids=np.zeros(1, np.int32))]
    for said, result in turns:
        for text, finish in (("", FinishReason.UNFINISHED), (said, FinishReason.STOP)):
            path.append(_judged(path, Role.ACTION, Source.POLICY, text, finish))
        if result:
            path.append(_judged(path, Role.OBSERVATION, Source.TOOL, result))
    return replace(item(), path=tuple(path), leaf=path[-1].index)


def _judged(
    path: list[JudgedSegment], role: Role, source: Source, text: str, finish: FinishReason = FinishReason.UNFINISHED
) -> JudgedSegment:
    ids = np.zeros(1, np.int32)
    return JudgedSegment(index=path[-1].index + 1, role=role, source=source, token_ids=ids, text=text, finish=finish)


async def test_turn_success_rewards_each_turn_whose_call_succeeded() -> None:
    made = conversation(("call 1", "42"), ("call 2", "2 lines\nerror: division by zero"), ("done", ""))
    assert [(turn.segment, turn.text) for turn in made.turns] == [(6, "call 1"), (9, "call 2"), (12, "done")]
    assert [seen.text for seen in made.turns[0].observations] == ["42"]
    options = {"success": 0.5, "failure": -1.0}
    rewards = await SCORERS.make(Extension("turn_success", options)).score(made)
    assert [(r.segment, r.value) for r in rewards] == [(6, 0.5), (9, -1.0)]
    rewards = await SCORERS.make(Extension("turn_success", {"error_pattern": "42"})).score(made)
    assert [(r.segment, r.value) for r in rewards] == [(6, 0.0), (9, 1.0)]


async def test_turn_success_reads_the_recorded_outcome_and_not_the_text() -> None:
    """The text of a successful call may show the word, and that of a failed one may not."""
    made = conversation(("call 1", "error: in the log that the tool printed"), ("call 2", "nothing"))
    tools = iter((ToolOutcome(name="log", ok=True), ToolOutcome(name="log", ok=False, error="TIME_LIMIT")))
    path = [replace(s, tool=next(tools)) if s.source is Source.TOOL else s for s in made.path]
    rewards = await SCORERS.make(Extension("turn_success", {})).score(replace(made, path=tuple(path)))
    assert [(r.value, r.evidence) for r in rewards] == [
        (1.0, "the call succeeded"),
        (0.0, "the call failed: TIME_LIMIT"),
    ]


async def test_turn_success_of_a_sample_without_a_call_does_not_apply() -> None:
    reward = await SCORERS.make(Extension("turn_success", {})).score(conversation(("done", "")))
    assert reward.outcome is Outcome.NOT_APPLICABLE


def test_turn_success_rejects_a_pattern_that_does_not_compile() -> None:
    with pytest.raises(ConfigError, match="error_pattern"):
        SCORERS.make(Extension("turn_success", {"error_pattern": "("}))


@pytest.mark.parametrize("text", ["<answer>" * 2000, "<answer>" * 2000 + "</answer><answer>" + "<answer>" * 2000])
def test_unclosed_tags_are_not_searched_to_the_end_of_the_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def record(pattern: re.Pattern[str], text: str) -> str | None:
        searched.append(text)
        return last_match(pattern, text)

    monkeypatch.setattr(extract, "last_match", record)
    found = extract.Extractor(extract.AnswerOptions()).find(item(text))
    assert found == last_match(re.compile(extract.ANSWER_TAG, re.DOTALL), text[-16_384:])
    (only,) = searched
    assert len(only) < 10 or only.endswith("</answer>")
