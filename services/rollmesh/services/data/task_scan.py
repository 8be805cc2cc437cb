"""One pass over rows of files: the rows of each split, and the labels of each task, in arrays.

    row files -> batches -> rows that the types of the columns prove to be good    whole columns, without records
                         -> all other rows                                         a record and its task, row by row

Both give the same result for a good row; only the second one gives the error of a malformed row. A task needs 4 bytes,
or none in a split whose rows are consecutive, and 2 bytes per label.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.data.labels import LabelCodes
from rollmesh.services.data.metrics import DROPPED
from rollmesh.services.data.task import Split
from rollmesh.services.data.task_fields import TaskMapping
from rollmesh.shared.domain.extras import PRIVATE_BYTES_MAX, PUBLIC_BYTES_MAX
from rollmesh.shared.store.records import RecordError
from rollmesh.shared.store.row_file import Bools, RowBatch
from rollmesh.shared.store.row_files import RowFiles, Scanned
from rollmesh.shared.telemetry.metrics import count

_log = logging.getLogger(__name__)

LABEL_VALUES_MAX = 65_536
"""Different values of a label of which each task has a code. A selector cannot use a label with more."""
BAD_ROWS_NAMED = 5
_SPLITS = tuple(Split)
_UNKNOWN = -1
_JSON_GROWTH = 6
"""Largest number of bytes of JSON of one byte of a text, which is a control character."""
_JSON_FRAME = 4
"""Quotes, or null."""

BadRow = Literal["fail", "skip"]
Rows = NDArray[np.uint32]
Codes = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The tasks of a split by position."""

    rows: Rows | range
    """Row of each task, in ascending order."""
    labels: dict[str, LabelCodes] = field(default_factory=dict)
    """Labels by name, without those of too many values."""


def scan_tasks(files: RowFiles, mapping: TaskMapping, on_bad_row: BadRow) -> dict[Split, SplitRows]:
    """Return the rows of each split. Folders decide the split if they name it and no field does.

    With `fail`, raise RecordError for the first malformed row. With `skip`, log how many rows are skipped and why the
    first ones are.
    """
    scan = _TaskScan(mapping, on_bad_row)
    for scanned in files.scan():
        scan.add(scanned)
    return scan.result()


class _TaskScan:
    def __init__(self, mapping: TaskMapping, on_bad_row: BadRow) -> None:
        self._mapping, self._fields, self._on_bad_row = mapping, mapping.fields, on_bad_row
        self._rows: dict[Split, list[Rows]] = {split: [] for split in Split}
        self._labels = {name: _LabelScan() for name in mapping.fields.labels}
        self._bad: list[str] = []
        self._num_bad = 0

    def add(self, scanned: Scanned) -> None:
        batch = scanned.batch
        given = Split(scanned.split) if scanned.split and not self._fields.split else None
        splits, labels = self._proven(batch, given)
        for index in np.flatnonzero(splits == _UNKNOWN).tolist():
            try:
                task = self._mapping.task(batch.record(index), task_id="-", reference="", split=given)
            except RecordError as error:
                self._reject(error)
                continue
            splits[index] = _SPLITS.index(task.split)
            for name, value in task.labels.items():
                labels[name][index] = self._labels[name].code(value)
        for number, split in enumerate(_SPLITS):
            members = np.flatnonzero(splits == number)
            if len(members):
                self._rows[split].append((members + scanned.start).astype(np.uint32))
                for name, codes in labels.items():
                    self._labels[name].add(split, codes[members])

    def result(self) -> dict[Split, SplitRows]:
        if self._num_bad:
            count(DROPPED, "malformed", amount=self._num_bad)
            _log.warning(
                "malformed rows skipped: source=%s rows=%d first=%s", self._fields.name, self._num_bad, self._bad
            )
        labels = {name: scan for name, scan in self._labels.items() if scan.complete}
        return {
            split: SplitRows(_compact(rows), {name: scan.codes(split) for name, scan in labels.items()})
            for split, rows in self._rows.items()
        }

    def _reject(self, error: RecordError) -> None:
        if self._on_bad_row == "fail":
            raise error
        self._num_bad += 1
        if len(self._bad) < BAD_ROWS_NAMED:
            self._bad.append(error.message)

    def _proven(self, batch: RowBatch, given: Split | None) -> tuple[NDArray[np.int8], dict[str, Codes]]:
        """Return the split, as an index of `_SPLITS`, and the codes of labels of each row that columns prove to be
        good. The split of the other rows is `_UNKNOWN`."""
        fields, num = self._fields, len(batch)
        good = np.ones(num, dtype=np.bool_)
        for name in (fields.prompt, fields.answer, fields.split, *fields.labels.values()):
            good &= _usable(batch, name)
        for name in (fields.agent, fields.scorers, fields.tools_field):
            good &= _usable(batch, name, names=True)
        good &= _fits(batch, fields.extras.values(), PUBLIC_BYTES_MAX)
        good &= _fits(batch, fields.private_extras.values(), PRIVATE_BYTES_MAX)
        if fields.answer_pattern or fields.tests:
            good[:] = False
        labels = {name: np.zeros(num, dtype=np.uint16) for name in fields.labels}
        splits = np.full(num, _UNKNOWN, dtype=np.int8)
        if not good.any():
            return splits, labels
        for name, column in fields.labels.items():
            indices, values = _encoded(batch, column)
            seen = np.zeros(len(values), dtype=np.bool_)
            seen[indices[good]] = True
            codes = [self._labels[name].code(value) if used else 0 for value, used in zip(values, seen, strict=True)]
            labels[name] = np.asarray(codes, dtype=np.uint16)[indices]
        if given is not None:
            found = np.full(num, _SPLITS.index(given), dtype=np.int8)
        elif fields.split:
            indices, values = _encoded(batch, fields.split)
            numbers = [_SPLITS.index(Split(value)) if value in set(Split) else _UNKNOWN for value in values]
            found = np.asarray(numbers, dtype=np.int8)[indices]
        else:
            found = self._by_hash(batch)
        splits[good] = found[good]
        return splits, labels

    def _by_hash(self, batch: RowBatch) -> NDArray[np.int8]:
        """Return what `split_of` returns for each prompt."""
        texts = batch.texts(self._fields.prompt)
        assert texts is not None, "rows are good"
        heads = b"".join([hashlib.sha256(text).digest()[:8] for text in texts.utf8()])
        fraction = np.frombuffer(heads, dtype=">u8").astype(np.uint64) / 2.0**64
        test, validation = self._fields.test_share, self._fields.validation_share
        numbers = [_SPLITS.index(split) for split in (Split.TEST, Split.VALIDATION, Split.TRAIN)]
        return np.select([fraction < test, fraction < test + validation], numbers[:2], numbers[2]).astype(np.int8)


class _LabelScan:
    """The codes of one label in all splits."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._codes: dict[Split, list[Codes]] = {split: [] for split in Split}
        self.complete = True
        """Whether the label has at most `LABEL_VALUES_MAX` values."""

    def code(self, value: str) -> int:
        if self.complete and value not in self._known:
            if len(self._known) == LABEL_VALUES_MAX:
                self.complete = False
                self._known.clear()
                self._codes = {split: [] for split in Split}
                return 0
            self._known[value] = len(self._known)
        return self._known.get(value, 0)

    def add(self, split: Split, codes: Codes) -> None:
        if self.complete:
            self._codes[split].append(codes)

    def codes(self, split: Split) -> LabelCodes:
        return LabelCodes(np.concatenate([np.empty(0, np.uint16), *self._codes.pop(split)]), tuple(self._known))


def _usable(batch: RowBatch, name: str, *, names: bool = False) -> Bools | bool:
    """Return which rows have a text in a field, or a string or null if `names`. True if the name of the field is empty,
    and False if only records show it."""
    if not name:
        return True
    texts = batch.texts(name)
    if texts is None or (names and not texts.strings):
        return False
    return texts.usable | ~texts.present if names else texts.usable


def _fits(batch: RowBatch, names: Iterable[str], bytes_max: int) -> Bools | bool:
    """Return which rows have texts that are at most `bytes_max` bytes of JSON in all."""
    size = np.zeros(len(batch), dtype=np.int64)
    for name in names:
        texts = batch.texts(name)
        if texts is None:
            return False
        size += texts.num_bytes * _JSON_GROWTH + _JSON_FRAME
    return size <= bytes_max


def _encoded(batch: RowBatch, name: str) -> tuple[NDArray[np.int64], list[str]]:
    texts = batch.texts(name)
    assert texts is not None, "rows are good"
    indices, values = texts.encoded()
    return indices, values or [""]


def _compact(parts: Sequence[Rows]) -> Rows | range:
    """Return rows as a range if they are consecutive."""
    rows: Rows = np.concatenate([np.empty(0, dtype=np.uint32), *parts])
    if not len(rows) or int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0)
    return rows
