"""A source that cuts stored trajectories of several turns into prompts, so that one step of the policy completes them.

The file has the samples of `rollmesh rollout --out`, with a reward `share` of each turn: p_t in [0, 1], the share of
the hidden tests that the code of turn t passes (scorer `tests` with `per: turn`, whose reward is NAME_share). For each
task:

    spread(sample) = max_t p_t - min_t p_t
    kept           = the samples with spread > 0 and max_t p_t = 1
    chosen         = the at most `per_task` kept samples whose spreads have the greatest variance

A chosen sample of T turns is cut after each turn k = 1..T-1: the prompt is the conversation up to what the model
observed after turn k, with the turns of the assistant. Cutting ends where the tests pass in two turns in a row, and
beyond `tokens_max`. With `first`, each task that not every sample solves at once is also a prompt without turns. The
label `turn` is k, and `best` is b = max_{t <= k} p_t, which the scorer `improvement` reads. The reference of the task
stays, so the reward service resolves the same answer key.

Perturbed trajectories, against copying of tests that the prompt shows: if `public` matches the public tests in a text
that is not of the model, such as `in: (?P<input>.*) out: (?P<output>.*)`, the outputs of the first two tests that
differ are swapped in all such texts, and the prompt is added again with the wrong tests in the label `wrong_tests`.

Source: Cobalt (2026-02; code: OSU-NLP-Group/cobalt, preproc/process_multi_turn_taco.py and run_perturbation.py): 3
turns, at most 4 trajectories per task, context of 10,000 tokens, and two swapped outputs. Deviations: the variance is
maximal over all choices of smallest and largest spreads (the code looks at the first 16 spreads), the authors end at
passed public tests, and they sample the trajectories again with the wrong tests, where this source changes the texts
of stored ones.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.config.settings import NonEmptyStr, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.store.jsonl import read_jsonl
from rollmesh.shared.store.records import FileRecord

NUM_LINES_MAX = 2_000_000
TURN, BEST, WRONG_TESTS = "turn", "best", "wrong_tests"


class TrajectoryOptions(Settings):
    """Settings of the source of cut trajectories."""

    path: NonEmptyStr
    """The samples: a file of `rollmesh rollout --out`, relative to the folder of the configuration."""
    share: NonEmptyStr = "tests_share"
    """Name of the reward of the turns."""
    per_task: PositiveInt = 4
    """Greatest number of samples of a task that are cut."""
    solved: bool = True
    """Whether a sample needs a turn that passes all tests. Otherwise a spread is enough."""
    tokens_max: PositiveInt = 10_000
    """Greatest length of a prompt, in tokens of the stored samples."""
    first: bool = True
    """Whether tasks are also given without turns."""
    public: str = ""
    """Regular expression of a public test with the groups `input` and `output`. Empty: no trajectory is perturbed."""
    num_lines_max: Annotated[int, Meta(ge=1, le=NUM_LINES_MAX)] = NUM_LINES_MAX
    """Maximum number of lines. The file is held in memory."""

    def check_fields(self) -> None:
        try:
            groups = set(re.compile(self.public).groupindex)
        except re.error as error:
            raise ValueError(f"`public` must be a regular expression, got {self.public!r}: {error}") from None
        if self.public and not {"input", "output"} <= groups:
            raise ValueError(f"`public` must have the groups `input` and `output`, got {self.public!r}")


class _Segment(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    index: int = -1
    finish: str = ""
    token_ids: list[int] = []


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a line that is read here."""

    sample_id: str
    task: str
    messages: list[Message]
    segments: list[_Segment]
    rewards: list[dict[str, Any]]
    split: str = ""
    labels: dict[str, str] = {}
    oracle_ref: str = ""
    agent: str = ""
    scorers: list[str] = []


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A stored sample by its turns."""

    stored: _Stored
    rates: tuple[float, ...]
    """p of each turn."""
    lengths: tuple[int, ...]
    """Number of tokens before each turn."""

    @property
    def spread(self) -> float:
        return max(self.rates) - min(self.rates)

    def prompt(self, turn: int) -> tuple[Message, ...]:
        """Return the conversation before turn `turn`, from 0."""
        said = [place for place, message in enumerate(self.stored.messages) if message.role == "assistant"]
        return tuple(self.stored.messages[: said[turn]])


class TrajectorySource(TaskSource):
    """See the module."""

    Options = TrajectoryOptions

    def __init__(self, *, options: TrajectoryOptions, base_dir: str | Path | None = None) -> None:
        self._options = options
        self._path = Path(base_dir or ".") / options.path
        self._public = re.compile(options.public) if options.public else None

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks. Raise ConfigError if the file cannot be read, and RecordError with file and line of a sample
        that cannot be cut."""
        by_task: dict[str, list[Trajectory]] = {}
        for record in read_jsonl(self._path, num_lines_max=self._options.num_lines_max).records:
            trajectory = _trajectory(record, self._options.share)
            by_task.setdefault(trajectory.stored.task, []).append(trajectory)
        for task, found in by_task.items():
            if self._options.first and not all(one.rates[0] == 1.0 for one in found):
                yield from self._made(found[0], 0, f"{task}-turn-0")
            for chosen in self._chosen(found):
                for turn in self._cuts(chosen):
                    yield from self._made(chosen, turn, f"{task}-{chosen.stored.sample_id}-turn-{turn}")

    def _chosen(self, found: Sequence[Trajectory]) -> list[Trajectory]:
        solved = self._options.solved
        kept = [one for one in found if one.spread > 0 and (max(one.rates) == 1.0 or not solved)]
        return [kept[place] for place in greatest_variance([one.spread for one in kept], self._options.per_task)]

    def _cuts(self, one: Trajectory) -> Iterator[int]:
        """Yield the numbers of turns after which a sample is cut."""
        for turn in range(1, len(one.rates)):
            if one.lengths[turn] > self._options.tokens_max or one.rates[max(turn - 2, 0) : turn] == (1.0, 1.0):
                return
            yield turn

    def _made(self, one: Trajectory, turn: int, task_id: str) -> Iterator[PoolTask]:
        """Yield the task, and its perturbed copy if it can be perturbed."""
        stored, messages = one.stored, one.prompt(turn)
        best = max(one.rates[:turn], default=0.0)
        labels = {**stored.labels, TURN: str(turn), BEST: repr(best)}
        changed, wrong = perturbed(messages, self._public) if self._public else (messages, ())
        copies = [(task_id, messages, labels)]
        if wrong:
            copies.append((f"{task_id}-perturbed", changed, {**labels, WRONG_TESTS: json.dumps(wrong)}))
        for name, shown, marked in copies:
            yield PoolTask(
                task_id=name,
                messages=shown,
                oracle_ref=stored.oracle_ref,
                labels=marked,
                split=Split(stored.split or Split.TRAIN),
                agent=stored.agent,
                scorers=tuple(stored.scorers),
            )


def greatest_variance(values: Sequence[float], num: int) -> list[int]:
    """Return the places of at most `num` values with the greatest variance, in their order. Such a choice consists of
    smallest and largest values."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    if len(order) <= num:
        return sorted(order)
    choices = [order[:low] + order[len(order) - (num - low) :] for low in range(num, -1, -1)]
    return sorted(max(choices, key=lambda choice: statistics.pvariance(values[place] for place in choice)))


def perturbed(
    messages: Sequence[Message], public: re.Pattern[str]
) -> tuple[tuple[Message, ...], tuple[tuple[str, str], ...]]:
    """Return the messages with the outputs of the first two public tests that differ swapped, and the two wrong tests
    as (input, output). Without two such tests there are no wrong ones, and the messages are the same."""
    outputs: dict[str, str] = {}
    for message in messages:
        for test in public.finditer(message.content) if message.role != "assistant" else ():
            outputs.setdefault(test["input"], test["output"])
    first = next(iter(outputs), "")
    second = next((given for given, output in outputs.items() if output != outputs[first]), None)
    if second is None:
        return tuple(messages), ()
    wrong = {first: outputs[second], second: outputs[first]}

    def swapped(test: re.Match[str]) -> str:
        begin, end = (place - test.start() for place in test.span("output"))
        whole = test[0]
        return whole[:begin] + wrong.get(test["input"], test["output"]) + whole[end:]

    changed = tuple(
        message
        if message.role == "assistant"
        else Message(role=message.role, content=public.sub(swapped, message.content))
        for message in messages
    )
    return changed, tuple(wrong.items())


def _trajectory(record: FileRecord, share: str) -> Trajectory:
    """Return the sample of a line. Raise RecordError."""
    try:
        stored = msgspec.convert(record.fields, type=_Stored)
    except msgspec.ValidationError as error:
        raise record.error(f"not a sample of `rollmesh rollout --out`: {error}") from None
    if stored.split and stored.split not in set(Split):
        raise record.error(f"must be one of {', '.join(Split)}, got {stored.split[:100]!r}", "split")
    ends, lengths, num_tokens, begun = [], [], 0, False
    for place, segment in enumerate(stored.segments):
        if segment.role == "action":
            if not begun:
                lengths.append(num_tokens)
            following = stored.segments[place + 1 : place + 2]
            begun = segment.finish in ("unfinished", "") and any(one.role == "action" for one in following)
            if not begun:
                ends.append(segment.index)
        num_tokens += len(segment.token_ids)
    by_segment = {
        reward["segment"]: float(reward["value"])
        for reward in stored.rewards
        if reward.get("name") == share and "segment" in reward and reward.get("outcome", "ok") == "ok"
    }
    missing = [turn for turn, end in enumerate(ends) if end not in by_segment]
    num_said = sum(message.role == "assistant" for message in stored.messages)
    if not ends or missing or num_said != len(ends):
        cause = f"turn {missing[0]} of {len(ends)} has none" if missing else f"{len(ends)} turns, {num_said} messages"
        raise record.error(f"must have the reward `{share}` of each turn, got: {cause}; set `per: turn` of the scorer")
    return Trajectory(stored=stored, rates=tuple(by_segment[end] for end in ends), lengths=tuple(lengths))
