"""CPU time of a scored sample, by scorer, of a usual answer, and of the longest text that is searched.

Scorers run one sample after another in this process, and `math`, `regex` and `json_schema` in one worker process each.
The CPU time is that of this process and of the workers, without their start. The judge of `rubric` is a function of
this process, so its time is that of the scorer alone. `tests` needs a sandbox and is in the bench `sandbox`.

How to read it: `us per sample` is the CPU time of one sample in microseconds; `over exact` is the ratio to `exact` in
the same lap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from time import perf_counter, process_time
from typing import Any, Unpack

from benchmarks.cpu_profile import CpuProfile
from benchmarks.report import Report, spread
from rollmesh.services.reward.item import TEXT_CHARS_MAX, AnswerKey, ScoreItem, TaskView
from rollmesh.services.reward.scorer import SCORERS, Scorer
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import EpisodeKey, FinishReason, Message
from rollmesh.shared.endpoints.answer import AskOptions, EndpointAnswer, Messages

BASELINE = "exact"
SCHEMA = {
    "type": "object",
    "required": ["id", "items"],
    "properties": {"id": {"type": "integer"}, "items": {"type": "array", "items": {"type": "string"}}},
}
REASONING = "We compare the two ways, and the second one is shorter by a third. "
"""Text before an answer."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one scorer scores."""

    scorer: str
    options: Mapping[str, Any]
    answer: str
    key: str = ""
    record: Mapping[str, Any] | None = None


MEASURED = {
    "exact": Measured("exact", {}, "<answer>42</answer>", "42"),
    "format": Measured("format", {"whole": False}, "<answer>42</answer>"),
    "length": Measured("length", {}, "<answer>42</answer>"),
    "choice": Measured("choice", {"pattern": ""}, "The answer is (C).", "C"),
    "squad": Measured("squad", {}, "<answer>the Denver Broncos</answer>", "Denver Broncos"),
    "ngram, rouge_l": Measured("ngram", {"pattern": ""}, "", REASONING * 8),
    "ngram, chrf": Measured("ngram", {"pattern": "", "form": "chrf"}, "", REASONING * 8),
    "repetition": Measured("repetition", {}, ""),
    "rubric": Measured("rubric", {"criteria": [{"criterion": "It is right."}]}, "42"),
    "regex": Measured("regex", {}, "<answer>2026-11-28</answer>", r"\d{4}-\d\d-\d\d"),
    "json_schema": Measured("json_schema", {}, '```json\n{"id": 7, "items": ["a", "b"]}\n```', "-", {"schema": SCHEMA}),
    "math": Measured("math", {}, "<answer>0.5</answer>", "\\frac{1}{2}"),
}
"""Scorers by the name of their row."""


class FixedJudge:
    """Implements `Asks` without a server: every criterion gets 1."""

    async def ask(self, endpoint: str, messages: Messages, **options: Unpack[AskOptions]) -> EndpointAnswer:
        return EndpointAnswer(text='{"1": 1}', finish=FinishReason.STOP, value={"1": 1})


def run(quick: bool) -> Report:
    return asyncio.run(_run(1 if quick else 5, 0.1 if quick else 0.8))


async def _run(repetitions: int, lap_s: float) -> Report:
    report = Report(
        "scorers",
        f"CPU time per sample, one at a time; long: {TEXT_CHARS_MAX:,} characters; laps of {lap_s} s: {repetitions}",
    )
    scorers: dict[str, Scorer] = {}
    spent: dict[tuple[str, bool], list[float]] = {}
    for name, measured in MEASURED.items():
        scorers[name] = SCORERS.make(Extension(measured.scorer, dict(measured.options)))
        scorers[name].use_endpoints(FixedJudge())
    try:
        for name in MEASURED:
            await scorers[name].score(item_of(name, False))  # starts its worker
        for _ in range(repetitions):
            for long in (False, True):
                for name in MEASURED:
                    us = await _us_per_sample(scorers[name], item_of(name, long), lap_s)
                    spent.setdefault((name, long), []).append(us)
    finally:
        for scorer in scorers.values():
            await scorer.close()
    for (name, long), values in spent.items():
        ratios = [value / base for value, base in zip(values, spent[BASELINE, long], strict=True)]
        report.rows.append(
            {
                "scorer": name,
                "text": "long" if long else "usual",
                "us per sample": spread(values),
                "over exact": spread(ratios, 1),
            }
        )
    return report


async def _us_per_sample(scorer: Scorer, item: ScoreItem, lap_s: float) -> float:
    """Score one sample again and again for `lap_s`, because clocks of CPU time may have a resolution of 10 ms."""
    num, end = 0, perf_counter() + lap_s
    with CpuProfile(lambda file: "scorer") as profile:
        before = process_time()
        while perf_counter() < end:
            await scorer.score(item)
            num += 1
        own_s = process_time() - before
    return 1e6 * (own_s + sum(profile.children.values())) / num


@cache
def item_of(name: str, long: bool) -> ScoreItem:
    """Return the sample of a row: an answer after some reasoning, except where a whole message is JSON."""
    measured = MEASURED[name]
    said = REASONING * (TEXT_CHARS_MAX // len(REASONING) + 1 if long else 8) + "\n" + measured.answer
    task = Message(role="user", content="Which way is shorter?")
    return ScoreItem(
        key=EpisodeKey(run="r", task="t", group="g", episode="g.0"),
        task=TaskView(task_id="t", messages=(task,)),
        answer_key=AnswerKey(answers=(measured.key or "-",), record=measured.record or {}),
        messages=(task, Message(role="assistant", content=said)),
        sample_id="s",
        num_action_tokens=100,
    )
