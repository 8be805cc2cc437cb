"""The keys of one submission are read from the ledger once while they are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollmesh.services.coordinator import answer_keys
from rollmesh.services.coordinator.answer_keys import AnswerKeys
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.fact_codec import encode_record
from rollmesh.shared.bus.archive_bus import LostRecords
from tests.tamper.archives import archived
from tests.tamper.ledger_copy import made


class Ledgers:
    """A ledger whose record N is the submission N-a of the tasks a and b."""

    def __init__(self) -> None:
        self.read_positions: list[int] = []

    async def open(self, name: str) -> Ledgers:
        return self

    async def read(self, position: int) -> SimpleNamespace:
        self.read_positions.append(position)
        keys = tuple(f.AnswerKey(task_id=name, answers=(f"{name}{position}",)) for name in "ab")
        fact = f.TasksSubmitted(submission=f"{position}-a", answer_keys=keys)
        return SimpleNamespace(payload=encode_record("d", 0.0, (fact,), "ab" * 32))


async def test_a_submission_is_decoded_once_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = Ledgers()
    keys = AnswerKeys(cast(Any, ledgers))
    found = await keys.find(["submitted:r/1-a/a", "submitted:r/2-a/b", "submitted:r/1-a/b"])
    assert [key.answers[0] for key in found] == ["a1", "b2", "b1"]
    await keys.find(["submitted:r/2-a/a"])
    assert ledgers.read_positions == [1, 2]
    monkeypatch.setattr(answer_keys, "KEPT_BYTES_MAX", 1)
    keys = AnswerKeys(cast(Any, ledgers))
    await keys.find(["submitted:r/3-a/a"])
    await keys.find(["submitted:r/3-a/b"])
    assert ledgers.read_positions[2:] == [3, 3]


async def test_keys_are_found_in_archive_segments_and_a_lost_segment_is_named(tmp_path: Path) -> None:
    facts = [
        (f.TasksSubmitted(submission=f"{n}-a", answer_keys=(f.AnswerKey(task_id="a", answers=(f"key {n}",)),)),)
        for n in range(1, 9)
    ]
    bus = await archived("r", made(facts), tmp_path)
    found = await AnswerKeys(bus).find([f"submitted:r/{n}-a/a" for n in range(1, 9)])
    assert [key.answers[0] for key in found] == [f"key {n}" for n in range(1, 9)]
    first = min((tmp_path / "r").iterdir())
    first.unlink()
    with pytest.raises(LostRecords, match="the archive segment of records 1 to 2 is missing"):
        await AnswerKeys(bus).find(["submitted:r/1-a/a"])
