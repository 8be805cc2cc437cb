"""A source that turns any text into multiple choice: which of the options is the part of the text that is masked?

For each passage, the endpoint `writer` returns JSON with a part of the passage that is a key step of its reasoning, and
texts in its place that are plausible and wrong:

    {"span": "...", "distractors": ["...", "..."]}

The part is replaced by [MASK]. The options are the part and `num_options` - 1 distractors. A distractor is rejected if
it is a near-duplicate of the part or of an earlier distractor:

    near-duplicate  if  |words of both| / |words of either| > similarity_max,   with equal numbers in both,
                    or if both are the same number, such as 0.5 and 1/2

A passage is dropped if the part does not occur exactly once, is shorter than `span_chars_min` or longer than
`span_share_max` of the passage, or if too few distractors remain. If the endpoint `solver` answers right each of
`solves` times, the task is too easy and is dropped. An answer of an endpoint that is not usable drops its passage;
text around the JSON object, such as a Markdown fence, is ignored. The number of dropped passages is logged by reason.

The order of the options is random by `seed` and the passage, so a policy that always answers with one letter is right
in 1 of `num_options` tasks. The reference of a task, `masked:SEED-DIGEST-OPTIONS`, determines the order, and the reward
service computes the letter from it (`option_order`). The scorer `choice` compares.

Source: Golden Goose (2026-01, arXiv:2601.22975; no public code): fill in the middle as multiple choice with 9 options,
and a filter of easy tasks. Its prompts, its test of near-duplicates and its filter are not established; these are the
project's own. For noisy text the paper first extracts a passage; here the file has the passages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from rollmesh.services.data.asking import AskingSource
from rollmesh.services.data.drops import Dropped, report_drops
from rollmesh.services.data.passages import Passage, PassageOptions, passages
from rollmesh.services.data.task import PoolTask
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeInt, PositiveInt
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.option_order import LETTERS, NUM_OPTIONS_MAX, letter_of_answer, option_order, option_value
from rollmesh.shared.domain.trajectory import Message

MASK = "[MASK]"
WRITE = """\
Choose one contiguous part of the text that is a key step of its reasoning, copied exactly as it stands.
Then write {num} different texts that are plausible in its place, similar in length and style, and wrong.
Return a JSON object and nothing else: {{"span": "the part", "distractors": ["text", ...]}}

Text:
{passage}"""
QUESTION = """\
A part of the text is replaced by {mask}. Which option is that part?

{text}

{options}

Return the letter of the option as <answer>LETTER</answer>."""
_WORDS = re.compile(r"\w+")


class MaskedOptions(PassageOptions):
    """Settings of the source of masked multiple choice."""

    writer: NonEmptyStr = "writer"
    """Endpoint that chooses the part and writes distractors."""
    solver: NonEmptyStr = "solver"
    """Endpoint that answers the tasks."""
    solves: NonNegativeInt = 0
    """Number of answers of the solver. A task of which all are right is dropped. 0: the solver is not asked."""
    num_options: Annotated[int, Meta(ge=2, le=NUM_OPTIONS_MAX)] = 9
    """Number of options."""
    num_spare: NonNegativeInt = 3
    """Number of distractors that the writer writes beyond those that are needed, because some may be rejected."""
    similarity_max: Annotated[float, Meta(ge=0, lt=1)] = 0.8
    """Similarity of words above which a distractor is a near-duplicate."""
    span_chars_min: PositiveInt = 8
    """Least length of the masked part, in characters."""
    span_share_max: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Greatest length of the masked part, as a share of the passage."""
    seed: int = 0
    """Seed of the order of the options."""


class WrittenMask(msgspec.Struct, frozen=True):
    """The answer of the writer."""

    span: str
    distractors: list[str]


class MaskedSource(AskingSource):
    """See the module."""

    Options = MaskedOptions

    def __init__(self, *, options: MaskedOptions, base_dir: str | Path | None = None) -> None:
        self._options, self._base_dir = options, base_dir

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks. Raise as `passages`, and as `AsksBlocking.ask`."""
        dropped: Counter[str] = Counter()
        for passage in passages(self._options, self._base_dir):
            try:
                task = self._task(passage)
            except Dropped as reason:
                dropped[str(reason)] += 1
            else:
                yield task
        report_drops(self._options.name, dropped)

    def _task(self, passage: Passage) -> PoolTask:
        """Return the task of a passage. Raise `Dropped`."""
        options = self._options
        num_wrong = options.num_options - 1
        asked = WRITE.format(num=num_wrong + options.num_spare, passage=passage.text)
        written = self._usable(self.ask(options.writer, asked), passage.text)
        wrong = distinct(written.span, written.distractors, options.similarity_max)[:num_wrong]
        if len(wrong) < num_wrong:
            raise Dropped("few_distractors")
        reference = f"{options.seed}-{passage.digest}-{options.num_options}"
        given = [" ".join(written.span.split()), *wrong]
        shown = [given[index] for index in option_order(reference, options.num_options)]
        question = QUESTION.format(
            mask=MASK,
            text=passage.text.replace(written.span, MASK),
            options="\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, shown, strict=False)),
        )
        task = PoolTask(
            task_id=f"{options.name}-{passage.number}",
            messages=(Message(role="user", content=question),),
            oracle_ref=f"masked:{reference}",
            split=passage.split,
        )
        if self._is_easy(task):
            raise Dropped("easy")
        return task

    def _usable(self, text: str, passage: str) -> WrittenMask:
        """Return what the writer wrote. Raise `Dropped` if it cannot become a task."""
        try:
            written = msgspec.json.decode(text[text.find("{") : text.rfind("}") + 1], type=WrittenMask)
        except UNDECODABLE:
            raise Dropped("malformed_answer") from None
        span = written.span.strip()
        longest = self._options.span_share_max * len(passage)
        if passage.count(span) != 1 or not self._options.span_chars_min <= len(span) <= longest or MASK in passage:
            raise Dropped("unusable_part")
        return WrittenMask(span, [" ".join(text.split()) for text in written.distractors])

    def _is_easy(self, task: PoolTask) -> bool:
        """Return whether the solver is right each time."""
        key = letter_of_answer(task.oracle_ref.partition(":")[2], self._options.num_options)
        said = [self.ask(self._options.solver, task.messages[0].content) for _ in range(self._options.solves)]
        return bool(said) and all(f"<answer>{key}</answer>" in text for text in said)


def distinct(span: str, distractors: Sequence[str], similarity_max: float) -> list[str]:
    """Return the distractors that are not near-duplicates of `span` or of an earlier one, and not empty."""
    kept = [span]
    for text in distractors:
        if _WORDS.search(text) and not any(is_near_duplicate(text, other, similarity_max) for other in kept):
            kept.append(text)
    return kept[1:]


def is_near_duplicate(one: str, other: str, similarity_max: float) -> bool:
    """Return whether two texts have the same numbers and nearly the same words, whatever the case and the marks, or are
    the same number."""
    if option_value(one) == option_value(other):
        return True
    words = [set(_WORDS.findall(text.casefold())) for text in (one, other)]
    numbers = [{word for word in found if any(char.isdigit() for char in word)} for found in words]
    same = len(words[0] & words[1]) / len(words[0] | words[1]) if any(words) else 1.0
    return numbers[0] == numbers[1] and same > similarity_max
