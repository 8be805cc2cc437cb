"""The keys of one submission are read from the ledger once while they are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollmesh.services.coordinator import answer_keys
from rollmesh.services.coordinator.answer_keys import AnswerKeys
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.fact_codec import encode_record


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
