"""The mapping from the fields of a record to a task, for sources of the user's files.

The answer field is checked here, so a malformed record is reported before the run starts, but its value is dropped at
once. A task has a reference to its record, which only the reward service resolves, because it reads the files itself.
Private extras are values of a task that its messages do not contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from rollmesh.services.data.task import PoolTask, Split, check_shares, split_of
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.extras import NAMES_MAX, ExtraError, ExtraName
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.store.records import FileRecord

ExtraFields = Annotated[dict[ExtraName, NonEmptyStr], Meta(max_length=NAMES_MAX)]
_SHOWN_CHARS_MAX = 100
"""Maximum length of a wrong value in an error."""


class TaskFields(Settings):
    """Settings of a source that maps records to tasks. A field name with dots means a field of a nested object."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] = "tasks"
    """Prefix of task ids and of oracle references; letters, digits, `_` and `-`."""
    prompt: NonEmptyStr = "question"
    """Field with the prompt: a string or a list of `{"role", "content"}` messages."""
    answer: str = "answer"
    """Field with the reference answer or a list of accepted answers. Empty means no answers."""
    tests: str = ""
    """Field with the manifest of hidden tests, an object or its JSON text (in Parquet and Arrow files, JSON text), or
    with its reference in the oracle store of the sandbox nodes. Empty means no tests. Only the reward service keeps the
    value."""
    answer_pattern: str = ""
    """Regular expression of the answer in its field. The last match counts, and its group 1 if the expression has one.
    For GSM8K: `#### (\\S+)`."""
    labels: dict[str, str] = {}
    """Field by label name, for example `{level: difficulty}`."""
    extras: ExtraFields = {}
    """Field by the name of a public extra, any JSON value, for example `{files: repository}`. Every process of the run
    may read it, and the ledger stores it: at most 64 KiB per task."""
    private_extras: ExtraFields = {}
    """Field by the name of a private extra, for example `{solution: worked}`. It stays at the data service, and only
    agents get it that `rollout.private_extras` permits to read it: at most 4 MiB per task."""
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
    tools_field: str = ""
    """Field with the name of the tool of the task, a list of names, or null for `tools`. Empty means `tools` for every
    task."""
    validation_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the hash range that is the validation split. Ignored if `split` is set."""
    test_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the hash range that is the test split. Ignored if `split` is set."""

    def check_fields(self) -> None:
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            raise ValueError(
                f"`answer_pattern` must be a regular expression, got {self.answer_pattern!r}: {error}"
            ) from None
        check_shares(self.validation_share, self.test_share)
        if both := self.extras.keys() & self.private_extras.keys():
            raise ValueError(f"`private_extras` must not have names of `extras`, got {min(both)!r} in both")
        public = {setting: getattr(self, setting) for setting in ("prompt", "split", "agent", "scorers", "tools_field")}
        public |= {f"labels.{name}": field for name, field in self.labels.items()}
        extras = {f"extras.{name}": field for name, field in self.extras.items()}
        _check_public(public | extras, tuple(self.private_extras.values()))
        _check_public(extras, (self.answer, self.tests))

    @property
    def has_key(self) -> bool:
        """Whether tasks have an answer key."""
        return bool(self.answer or self.tests)

    @property
    def read(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (*self.drawn, *self.private_extras.values())

    @property
    def drawn(self) -> tuple[str, ...]:
        """The fields of a task without private extras."""
        named = (self.prompt, self.answer, self.tests, self.split, self.agent, self.scorers, self.tools_field)
        return tuple(field for field in (*named, *self.labels.values(), *self.extras.values()) if field)


def _check_public(public: Mapping[str, str], private: Sequence[str]) -> None:
    """Raise ValueError if a setting of `public` has a private field, a part of one, or an object with one."""
    for setting, field in public.items():
        for hidden in private:
            if f"{field}.".startswith(f"{hidden}.") or f"{hidden}.".startswith(f"{field}."):
                raise ValueError(
                    f"`{setting}` must not have the private field {hidden!r}, because every process of the run can "
                    f"read it, got {field!r}"
                )


class TaskMapping:
    """Makes tasks of records."""

    def __init__(self, fields: TaskFields) -> None:
        self.fields = fields
        self._pattern = re.compile(fields.answer_pattern) if fields.answer_pattern else None
        self._default_tools = f"`tools` ({', '.join(fields.tools)})"
        self._system = (Message(role="system", content=fields.system),) if fields.system else ()

    def task(
        self, record: FileRecord, *, task_id: str, reference: str, split: Split | None = None, private: bool = True
    ) -> PoolTask:
        """Return the task of a record, without private extras unless `private`. `reference` names the record for the
        oracle. Without a `split`, the record decides. Raise RecordError."""
        fields = self.fields
        if fields.answer:
            record.extract_all(fields.answer, self._pattern)
        if fields.tests:
            record.tests(fields.tests)
        prompt = _prompt(record, fields.prompt)
        try:
            return PoolTask(
                task_id=task_id,
                messages=(*self._system, *prompt),
                tools=_names(record, fields.tools_field, "tool", self._default_tools) or fields.tools,
                oracle_ref=reference if fields.has_key else "",
                labels={label: record.text(field) for label, field in fields.labels.items()},
                split=_split(record, fields, prompt) if split is None else split,
                agent=_agent(record, fields.agent),
                scorers=_names(record, fields.scorers, "reward", "all"),
                extras={name: record.value(field) for name, field in fields.extras.items()},
                private_extras={name: record.value(field) for name, field in fields.private_extras.items() if private},
            )
        except ExtraError as error:
            raise record.error(error.what, (fields.extras | fields.private_extras)[error.name]) from None


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


def _split(record: FileRecord, fields: TaskFields, prompt: tuple[Message, ...]) -> Split:
    if not fields.split:
        text = "\n".join(message.content for message in prompt)
        return split_of(text, validation_share=fields.validation_share, test_share=fields.test_share)
    named = record.text(fields.split)
    if named not in set(Split):
        raise record.error(f"must be one of {', '.join(Split)}, got {_shown(named)}", fields.split)
    return Split(named)


def _agent(record: FileRecord, field: str) -> str:
    value = record.value(field) if field else None
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise record.error(f"must be the name of an agent, or null for the default agent, got {_shown(value)}", field)
    return value or ""


def _names(record: FileRecord, field: str, what: str, default: str) -> tuple[str, ...]:
    """Return the different names in a field. Without a field, and for null, there are none."""
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
            f"must be the name of a {what}, a list of different names, or null for {default}, got {_shown(value)}",
            field,
        )
    return tuple(names)


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:_SHOWN_CHARS_MAX]
