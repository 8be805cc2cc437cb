"""A source that lets models make the questions of a JSONL file harder, and admits the ones that stay right and hard.

For each training task, `rounds` times: the endpoint `writer` rewrites the question. It injects the next fact of the
line, so that the fact must be found instead of the name that it describes; without facts left, it blurs a detail. The
endpoint `checker` then gets both questions, the answer and the fact. If it says that the new question has this answer
and only this one, the question replaces the old one, else the old one stays. A question that did not change is not
a new task. At last, the endpoint `solver` answers `solves` times without tools. If it is right each time, the task is
too easy and is dropped. The answer is always that of the line, so the reward service resolves the same reference as for
the source `jsonl`. Tasks of other splits are those of the file.

Source: the data synthesis of ASearcher (2025-08, arXiv:2508.07976): injection, fuzzing, and verification of quality,
difficulty and uniqueness. Its prompts and thresholds are not established; these are the project's own. A source is read
at every start, so its endpoints need `replay` (docs/endpoints.md), and an answer that is not usable rejects a
question instead of failing the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rollmesh.services.data.asking import AskingSource
from rollmesh.services.data.jsonl_source import JsonlOptions, JsonlSource
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeInt, PositiveInt
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.store.jsonl import read_jsonl
from rollmesh.shared.store.records import FileRecord

INJECT = """\
Rewrite the question so that it describes something it names by this fact, and no longer names it. The answer stays the same.
Return the question only.

Question: {question}
Fact: {fact}"""  # noqa: E501
FUZZ = """\
Rewrite the question so that one of its details is less exact, such as a range in place of a year. The answer stays the same.
Return the question only.

Question: {question}"""  # noqa: E501
CHECK = """\
The first question has the answer {answer}. Is this also an answer to the second question, and the only one?
{fact}
First question: {old}
Second question: {new}

Return yes or no."""
SOLVE = """\
Answer in as few words as possible.

{question}"""
QUESTION_CHARS_MAX = 4_000


class SynthesizedOptions(JsonlOptions):
    """Settings of the source of synthesized questions."""

    writer: NonEmptyStr = "writer"
    """Endpoint that rewrites questions."""
    checker: NonEmptyStr = "checker"
    """Endpoint that says whether a question still has the answer."""
    solver: NonEmptyStr = "solver"
    """Endpoint that answers without tools."""
    facts: str = "facts"
    """Field with facts about what the question names, a list of texts; dots separate names of nested objects. Lines may
    have none. Empty: no line has."""
    rounds: PositiveInt = 2
    """Number of rewrites of a question."""
    solves: NonNegativeInt = 2
    """Number of answers without tools. A task that all of them solve is dropped. 0: none is."""

    def check_fields(self) -> None:
        super().check_fields()
        if not self.answer:
            raise ValueError("`answer` must name a field, got '', because questions are checked with their answers")


class SynthesizedSource(AskingSource, JsonlSource):
    """See the module."""

    Options = SynthesizedOptions

    def __init__(self, *, options: SynthesizedOptions, base_dir: str | Path | None = None) -> None:
        super().__init__(options=options, base_dir=base_dir)
        self._settings = options
        self._pattern = re.compile(options.answer_pattern) if options.answer_pattern else None

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks. Raise as `JsonlSource.tasks`, and as `AsksBlocking.ask`."""
        file = read_jsonl(self._path, num_lines_max=self._settings.num_lines_max)
        for record, task in zip(file.records, super().tasks(), strict=True):
            if task.split is not Split.TRAIN:
                yield task
                continue
            first = task.messages[-1].content
            question = self._harder(record, first)
            if question != first and not self._is_easy(record, question):
                messages = (*task.messages[:-1], Message(role=task.messages[-1].role, content=question))
                yield replace(task, task_id=f"{task.task_id}-synthesized", messages=messages)

    def _harder(self, record: FileRecord, question: str) -> str:
        settings = self._settings
        answers = record.extract_all(settings.answer, self._pattern)
        facts = _facts(record, settings.facts)
        for number in range(settings.rounds):
            fact = facts[number] if number < len(facts) else ""
            asked = (INJECT if fact else FUZZ).format(question=question, fact=fact)
            new = self.ask(settings.writer, asked)
            has_answer = any(answer.casefold() in new.casefold() for answer in answers)
            if not new or new == question or len(new) > QUESTION_CHARS_MAX or has_answer:
                continue
            check = CHECK.format(
                answer=" or ".join(answers),
                fact=f"Fact: {fact}\n" if fact else "",
                old=question,
                new=new,
            )
            if _is_yes(self.ask(settings.checker, check)):
                question = new
        return question

    def _is_easy(self, record: FileRecord, question: str) -> bool:
        """Return whether the solver answers right each time."""
        answers = record.extract_all(self._settings.answer, self._pattern)
        accepted = {answer.casefold() for answer in answers}
        asked = SOLVE.format(question=question)
        said = [self.ask(self._settings.solver, asked) for _ in range(self._settings.solves)]
        return bool(said) and all(answer.strip(" .").casefold() in accepted for answer in said)


def _facts(record: FileRecord, field: str) -> list[str]:
    """Return the facts of a line. Raise RecordError if its field is not a list of texts."""
    given = record.value(field, []) if field else []
    if not isinstance(given, list) or not all(isinstance(fact, str) and fact.strip() for fact in given):
        raise record.error("must be a list of non-empty strings", field)
    return [fact.strip() for fact in given]


def _is_yes(text: str) -> bool:
    return text.strip(" .\n").casefold() == "yes"
