"""A source that asks the questions of a JSONL file as multiple choice or as open questions, whatever the file has.

A line has a question, an answer, and perhaps options, of which the answer is one: its text or its letter.

    template   line with options                         line without options
    choice     its options                               the answer, and answers of other lines
    open       the question alone                        the question alone

So the template, not the file, determines the size of the answer space. `as_given` is `choice` for a line with options,
else `open`. Options are in a random order. A line that cannot become a task whose answer a rule can check is dropped.
The number of dropped lines by reason is logged and counted:

    malformed_options   the options are not a list of texts and numbers
    refers_to_options   an option means others, as in "none of the above" or "A and B"
    not_an_option       the line has options, and the answer names none of them by its text, value or letter
    equal_options       several options have the value of the answer, such as 0.5 and 1/2, and none its text alone
    too_few_options     `choice`: fewer than 2 options with different values, or fewer such other answers than
                        `num_options` needs
    answer_too_long     `open`: more than `answer_words_max` words, which a rule rarely recognizes in other words
    not_checkable       `open`: the answer is neither words, nor a number or an expression that `math` can parse
    needs_options       `open`: the question refers to options, as in "which of the following"

The key of a `choice` is a letter that the reference determines (`masked:`, see `option_order`); the key of an `open`
question is read from the file by the reward service (`jsonl:`). The scorer `math` compares both. The split depends on
the question alone, so that no template moves a held-out question into training. Other answers are those of questions of
the same split.

Source: Nemotron-CrossThink (2025-04, arXiv:2504.13941): templates, and a filter of answers that a rule cannot check.
Its rules are not established; these are the project's own.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from rollmesh.services.data.checkable import is_checkable
from rollmesh.services.data.drops import Dropped, report_drops
from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask, Split, check_shares, split_of
from rollmesh.shared.config.settings import NonEmptyStr, PositiveInt, Settings
from rollmesh.shared.domain.option_order import (
    LETTERS,
    NUM_OPTIONS_MAX,
    option_named,
    option_order,
    option_value,
    plain_options,
)
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.store.jsonl import read_jsonl
from rollmesh.shared.store.records import FileRecord

NUM_LINES_MAX = 2_000_000
_REFERS = re.compile(
    r"\b(?:(?:which|who|whom|what)(?: \w+)? of (?:the following|these)"
    r"|(?:options?|choices?|statements?) (?:below|above))\b",
    re.IGNORECASE,
)
"""A question that cannot be asked without its options."""

_OF_OPTIONS = re.compile(
    r"(?:all|none|both|neither)(?: of .*)?|(?:both )?[A-J](?:, [A-J])*,? (?:and|or) [A-J]", re.IGNORECASE
)
"""An option that means other options, whose order changes."""


class TemplatedOptions(Settings):
    """Settings of the source of templates."""

    path: NonEmptyStr
    """UTF-8 file with one JSON object per line, relative to the folder of the configuration."""
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] = "questions"
    """Prefix of task ids and of oracle references; letters, digits, `_` and `-`."""
    question: NonEmptyStr = "question"
    """Field with the question."""
    answer: NonEmptyStr = "answer"
    """Field with the answer."""
    options: str = ""
    """Field with the list of options of a line, or null. Empty means no options."""
    template: Literal["as_given", "choice", "open"] = "as_given"
    """How the questions are asked."""
    num_options: Annotated[int, Meta(ge=2, le=NUM_OPTIONS_MAX)] = 4
    """Number of options of a line without options, and greatest number of a line with options."""
    answer_words_max: PositiveInt = 10
    """Greatest number of words of the answer of an open question."""
    choice: NonEmptyStr = "{prompt}\n\n{options}\n\nReturn the letter of the right option as <answer>LETTER</answer>."
    """Prompt of a multiple choice."""
    open: NonEmptyStr = "{prompt}\n\nReturn the answer as <answer>ANSWER</answer>."
    """Prompt of an open question."""
    seed: int = 0
    """Seed of the order of the options, and of the choice of other answers."""
    validation_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the hash range of questions that is the validation split."""
    test_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the hash range of questions that is the test split."""

    def check_fields(self) -> None:
        for field, text, places in (
            ("choice", self.choice, ("{prompt}", "{options}")),
            ("open", self.open, ("{prompt}",)),
        ):
            if missing := [place for place in places if place not in text]:
                raise ValueError(f"`{field}` must contain {' and '.join(missing)}, got {text!r}")
        check_shares(self.validation_share, self.test_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A line that has a question and an answer."""

    line: int
    text: str
    answer: str
    options: tuple[str, ...]
    """The options, of which one is the answer; empty for a line without options."""
    split: Split

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.text}\n{self.answer}".encode()).hexdigest()[:16]


class TemplatedSource(TaskSource):
    """See the module."""

    Options = TemplatedOptions

    def __init__(self, *, options: TemplatedOptions, base_dir: str | Path | None = None) -> None:
        """A relative path is relative to `base_dir`, by default the current folder."""
        self._options = options
        self._path = Path(base_dir or ".") / options.path

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks, in the order of the file. Raise ConfigError if the file cannot be read, and RecordError with
        file, line and field of a malformed record."""
        file = read_jsonl(self._path, num_lines_max=NUM_LINES_MAX)
        dropped: Counter[str] = Counter()
        questions: list[_Question] = []
        for record in file.records:
            try:
                questions.append(self._question(record))
            except Dropped as reason:
                dropped[str(reason)] += 1
        answers = {split: _different(q.answer for q in questions if q.split is split) for split in Split}
        for question in questions:
            try:
                task = self._task(question, answers[question.split], file.digest)
            except Dropped as reason:
                dropped[str(reason)] += 1
            else:
                yield task
        report_drops(self._options.name, dropped)

    def _question(self, record: FileRecord) -> _Question:
        """Raise RecordError for a line without a question or an answer, or Dropped."""
        options = self._options
        text, answer = record.text(options.question).strip(), _in_a_line(record.text(options.answer))
        given = _given(record, options.options)
        if given:
            if (place := option_named(answer, given)) is None:
                equal = [option_value(option) for option in given].count(option_value(answer))
                raise Dropped("equal_options" if equal > 1 else "not_an_option")
            answer = given[place]
        split = split_of(text, validation_share=options.validation_share, test_share=options.test_share)
        return _Question(line=record.line, text=text, answer=answer, options=given, split=split)

    def _task(self, question: _Question, answers: Sequence[str], file_digest: str) -> PoolTask:
        """Return the task of a question. `answers` are those of all questions. Raise Dropped."""
        options = self._options
        template = options.template
        if template == "as_given":
            template = "choice" if question.options else "open"
        if template == "choice":
            wrong = self._wrong(question, answers)
            reference = f"masked:{options.seed}-{question.digest}-{len(wrong) + 1}"
            order = option_order(reference.partition(":")[2], len(wrong) + 1)
            texts = [question.answer, *wrong]
            shown = "\n".join(f"{letter}. {texts[index]}" for letter, index in zip(LETTERS, order, strict=False))
            prompt = _filled(options.choice, prompt=question.text, options=shown)
        else:
            if _REFERS.search(question.text):
                raise Dropped("needs_options")
            if len(question.answer.split()) > options.answer_words_max:
                raise Dropped("answer_too_long")
            if not is_checkable(question.answer):
                raise Dropped("not_checkable")
            reference = f"jsonl:{options.name}@{file_digest[:16]}#{question.line}"
            prompt = _filled(options.open, prompt=question.text)
        return PoolTask(
            task_id=f"{options.name}-{question.line}",
            messages=(Message(role="user", content=prompt),),
            oracle_ref=reference,
            labels={"template": template},
            split=question.split,
        )

    def _wrong(self, question: _Question, answers: Sequence[str]) -> list[str]:
        """Return the wrong options of a multiple choice. Raise Dropped if they are too few."""
        options = self._options
        num, needed = options.num_options - 1, 1
        others: Sequence[str] = question.options
        if not others:
            needed = num
            others = random.Random(f"{options.seed}/{question.digest}").sample(answers, min(len(answers), num + 1))
        wrong = _different([question.answer, *others])[1 : num + 1]
        if len(wrong) < needed:
            raise Dropped("too_few_options")
        return wrong


def _filled(template: str, **texts: str) -> str:
    """Return the template with texts in place of `{name}`. Braces in the texts, and other ones, stay."""
    return re.sub(r"\{(\w+)\}", lambda place: texts.get(place[1], place[0]), template)


def _given(record: FileRecord, field: str) -> tuple[str, ...]:
    """Return the options of a line. Raise Dropped unless they are texts or numbers, none about others."""
    value = record.value(field, None)
    if value is None or value == []:
        return ()
    kinds = (str, int, float)
    if not isinstance(value, list) or not all(isinstance(one, kinds) and str(one).strip() for one in value):
        raise Dropped("malformed_options")
    texts = tuple(_in_a_line(text) for text in plain_options(value))
    if any(_OF_OPTIONS.fullmatch(text) for text in texts):
        raise Dropped("refers_to_options")
    return texts


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


def _different(texts: Iterable[str]) -> list[str]:
    """Return the texts whose `option_value` differs from those of all earlier ones, in their order."""
    found: dict[str | Fraction, str] = {}
    for text in texts:
        found.setdefault(option_value(text), text)
    return list(found.values())
