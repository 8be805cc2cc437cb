"""Recorded answers of an endpoint: JSON lines in a folder, one file per process that records.

An answer is found by (scope, digest, number): the episode or sample that asked, the request, and how often it was made
before there. Without an answer of that scope, the newest one of the same request and number is taken, so that the
answers also serve a run whose episodes have other ids. Of several answers for one key, the newest one counts: an
episode that was repeated used that one.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.endpoints.answer import AskedPrompt, ModelReply
from rollmesh.shared.errors import ConfigError


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a file."""

    digest: str
    """Hash of endpoint, model and request."""
    number: int
    """How often the same request was made before in its scope."""
    scope: str
    """Id of the episode or sample; empty outside of an episode."""
    time_s: float
    """Seconds since the Unix epoch."""
    model: str
    asked: AskedPrompt
    reply: ModelReply


class AnswerStore:
    """The recorded answers of one endpoint. Used on one event loop."""

    def __init__(self, endpoint: str, *, record: Path | None, replay: Path | None) -> None:
        """Read the answers in `replay`. Raises ConfigError for a folder that does not exist or a malformed line."""
        self._endpoint = endpoint
        self._record = record
        self._exact: dict[tuple[str, str, int], RecordedAnswer] = {}
        self._any: dict[tuple[str, int], RecordedAnswer] = {}
        self._file = -1
        if replay is not None:
            self._read(replay, required=record is None)

    def find(self, digest: str, number: int, scope: str) -> ModelReply | None:
        """Return the recorded answer; None if there is none."""
        found = self._exact.get((scope, digest, number)) or self._any.get((digest, number))
        return found.reply if found is not None else None

    def add(self, answer: RecordedAnswer) -> None:
        """Append an answer to the file of this process, if answers are recorded. Raises OSError."""
        if self._record is None:
            return
        if self._file < 0:
            self._record.mkdir(parents=True, exist_ok=True)
            path = self._record / f"{self._endpoint}-{RandomIds().new()}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        line = msgspec.json.encode(answer) + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self._record}: the answer was written only in part; check the disk")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, folder: Path, *, required: bool) -> None:
        if required and not folder.is_dir():
            raise ConfigError(
                f"`replay`: there is no folder {folder}; record answers first, with `record`", key="replay"
            )
        found = [answer for path in sorted(folder.glob(f"{self._endpoint}-*.jsonl")) for answer in _answers(path)]
        for answer in sorted(found, key=lambda one: one.time_s):
            self._exact[answer.scope, answer.digest, answer.number] = answer
            self._any[answer.digest, answer.number] = answer


def _answers(path: Path) -> list[RecordedAnswer]:
    """Return the answers of a file. A last line without end is skipped, because its process was killed while it
    wrote."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as err:
        raise ConfigError(f"`replay`: cannot read {path}: {err.strerror}", key="replay") from err
    answers = []
    for number, line in enumerate(lines, 1):
        try:
            answers.append(msgspec.json.decode(line, type=RecordedAnswer))
        except UNDECODABLE as err:
            raise ConfigError(f"`replay`: {path}, line {number} is not a recorded answer: {err}", key="replay") from err
    return answers
