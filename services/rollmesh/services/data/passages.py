"""Passages of raw text: the field of each line of a JSONL file, or the paragraphs of a text file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from rollmesh.services.data.task import Split, check_shares, split_of
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.jsonl import read_jsonl

NUM_PASSAGES_MAX = 2_000_000
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n")


class PassageOptions(Settings):
    """Settings of a source of tasks that are made of raw text."""

    path: NonEmptyStr
    """UTF-8 file, relative to the folder of the configuration: a text file, whose paragraphs end with an empty line, or
    a JSONL file, whose name ends with `.jsonl`."""
    field: NonEmptyStr = "text"
    """Field of a line of a JSONL file with the text."""
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] = "passage"
    """Prefix of task ids; letters, digits, `_` and `-`."""
    chars_min: NonNegativeInt = 200
    """Least length of a passage, in characters. Shorter ones are skipped."""
    chars_max: PositiveInt = 8_000
    """Greatest length of a passage, in characters. Longer ones are skipped."""
    validation_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the hash range of passages that is the validation split."""
    test_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the hash range of passages that is the test split."""

    def check_fields(self) -> None:
        if self.chars_min > self.chars_max:
            raise ValueError(f"`chars_min` must be <= chars_max = {self.chars_max}, got {self.chars_min}")
        check_shares(self.validation_share, self.test_share)


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of the file."""

    number: int
    """Number of the line, or of the paragraph, from 1."""
    text: str
    split: Split

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def passages(options: PassageOptions, base_dir: str | Path | None) -> Iterator[Passage]:
    """Yield the passages of a length in the limits, in the order of the file, each text once. Raise ConfigError if the
    file cannot be read, and RecordError with file, line and field of a malformed line."""
    path = Path(base_dir or ".") / options.path
    seen: set[str] = set()
    for number, text in _texts(path, options.field):
        if options.chars_min <= len(text) <= options.chars_max and text not in seen:
            seen.add(text)
            split = split_of(text, validation_share=options.validation_share, test_share=options.test_share)
            yield Passage(number, text, split)


def _texts(path: Path, field: str) -> Iterator[tuple[int, str]]:
    if path.suffix == ".jsonl":
        for record in read_jsonl(path, num_lines_max=NUM_PASSAGES_MAX).records:
            yield record.line, record.text(field).strip()
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else f"is not UTF-8: {error.reason}"
        raise ConfigError(f"cannot read {path}: {cause}; give the path of a text file", path=path) from error
    for number, paragraph in enumerate(_PARAGRAPH_END.split(text), start=1):
        yield number, paragraph.strip()
