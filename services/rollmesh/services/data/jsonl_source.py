"""A source of tasks in a JSONL file, with a mapping from its fields to those of a task.

The answer field is checked here, so a malformed line is reported before the run starts, but its value is dropped at
once. A task has the reference `jsonl:NAME@DIGEST#LINE`. Only the reward service resolves it, because it reads the file
itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask, Split, check_shares, split_of
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.store.jsonl import read_jsonl
from rollmesh.shared.store.records import FileRecord

NUM_LINES_MAX = 2_000_000
_SHOWN_CHARS_MAX = 100
"""Maximum length of a wrong value in an error."""


class JsonlOptions(Settings):
    """Settings of a JSONL source. A field name with dots means a field of a nested object."""

    path: NonEmptyStr
    """UTF-8 file with one JSON object per line, relative to the folder of the configuration."""
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] = "tasks"
    """Prefix of task ids and of oracle references; letters, digits, `_` and `-`."""
    prompt: NonEmptyStr = "question"
    """Field with the prompt: a string or a list of `{"role", "content"}` messages."""
    answer: str = "answer"
    """Field with the reference answer or a list of accepted answers. Empty means no answers."""
    tests: str = ""
    """Field with the manifest of hidden tests, or with its reference in the oracle store of the sandbox nodes. Empty
    means no tests. Only the reward service reads the value."""
    answer_pattern: str = ""
    """Regular expression of the answer in its field. The last match counts, and its group 1 if the expression has one.
    For GSM8K: `#### (\\S+)`."""
    labels: dict[str, str] = {}
    """Field by label name, for example `{level: difficulty}`."""
    split: str = ""
    """Field with train, validation or test. Empty means hash ranges of the prompt."""
    agent: str = ""
    """Field with the name of the task's agent, an entry of `rollout.agents`, or null for the default agent. Empty means
    the default agent for every task."""
    scorers: str = ""
    """Field with the name of the reward that scores the task, a list of names, or null for all. Empty means all rewards
    for every task."""
    system: str = ""
    """System message before every prompt. Empty means no system message."""
    tools: tuple[str, ...] = ()
    """Names of the tools of each task."""
    validation_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the hash range that is the validation split. Ignored if `split` is set."""
    test_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the hash range that is the test split. Ignored if `split` is set."""
    num_lines_max: Annotated[int, Meta(ge=1, le=NUM_LINES_MAX)] = NUM_LINES_MAX
    """Maximum number of lines. The file is held in memory."""

    def check_fields(self) -> None:
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            raise ValueError(
                f"`answer_pattern` must be a regular expression, got {self.answer_pattern!r}: {error}"
            ) from None
        check_shares(self.validation_share, self.test_share)


class JsonlSource(TaskSource):
    """Provides tasks in the order of the file."""

    Options = JsonlOptions

    def __init__(self, *, options: JsonlOptions, base_dir: str | Path | None = None) -> None:
        """A relative path is relative to `base_dir`, by default the current folder."""
        self._options = options
        self._path = Path(base_dir or ".") / options.path

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks. Raise ConfigError if the file cannot be read, and RecordError with file, line and field of a
        malformed record."""
        options = self._options
        file = read_jsonl(self._path, num_lines_max=options.num_lines_max)
        pattern = re.compile(options.answer_pattern) if options.answer_pattern else None
        for record in file.records:
            if options.answer:
                record.extract_all(options.answer, pattern)
            if options.tests:
                record.value(options.tests)
            prompt = _prompt(record, options.prompt)
            system = (Message(role="system", content=options.system),) if options.system else ()
            has_key = options.answer or options.tests
            yield PoolTask(
                task_id=f"{options.name}-{record.line}",
                messages=(*system, *prompt),
                tools=options.tools,
                oracle_ref=f"jsonl:{options.name}@{file.digest[:16]}#{record.line}" if has_key else "",
                labels={label: record.text(field) for label, field in options.labels.items()},
                split=_split(record, options, prompt),
                agent=_agent(record, options.agent),
                scorers=_scorers(record, options.scorers),
            )


def _prompt(record: FileRecord, field: str) -> tuple[Message, ...]:
    value = record.value(field)
    if not isinstance(value, list):
        return (Message(role="user", content=record.text(field)),)
    if not value:
        raise record.error("is an empty list of messages", field)
    return tuple(_message(record, field, index, entry) for index, entry in enumerate(value))


def _message(record: FileRecord, field: str, index: int, entry: object) -> Message:
    if not isinstance(entry, dict):
        raise record.error(f"message {index} must be an object with role and content", field)
    role, content = entry.get("role"), entry.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or not role:
        raise record.error(f"message {index} must have the strings role and content", field)
    return Message(role=role, content=content)


def _split(record: FileRecord, options: JsonlOptions, prompt: tuple[Message, ...]) -> Split:
    if not options.split:
        text = "\n".join(message.content for message in prompt)
        return split_of(text, validation_share=options.validation_share, test_share=options.test_share)
    named = record.text(options.split)
    if named not in set(Split):
        raise record.error(f"must be one of {', '.join(Split)}, got {named!r}", options.split)
    return Split(named)


def _agent(record: FileRecord, field: str) -> str:
    value = record.value(field) if field else None
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise record.error(f"must be the name of an agent, or null for the default agent, got {_shown(value)}", field)
    return value or ""


def _scorers(record: FileRecord, field: str) -> tuple[str, ...]:
    value = record.value(field) if field else None
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name.strip() for name in names)
        or len(set(names)) != len(names)
    ):
        raise record.error(
            f"must be the name of a reward, a list of different names, or null for all, got {_shown(value)}", field
        )
    return tuple(names)


def _shown(value: object) -> str:
    return json.dumps(value)[:_SHOWN_CHARS_MAX]
