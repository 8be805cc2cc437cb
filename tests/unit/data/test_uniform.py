"""The uniform selector: epochs are permutations."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.selectors.uniform import UniformSelector
from rollmesh.services.data.task import PoolTask
from rollmesh.shared.errors import CorruptSnapshot


def selector(num_tasks: int, seed: int = 0) -> UniformSelector:
    pool = MemoryPool(PoolTask(task_id=f"t{i}", messages=()) for i in range(num_tasks))
    return UniformSelector(pool=pool, seed=seed)


def draws(chosen: UniformSelector, first: int, stop: int) -> list[int]:
    return [chosen.draw(i, frozenset()) for i in range(first, stop)]


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    chosen = selector(50)
    epochs = [draws(chosen, e * 50, (e + 1) * 50) for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_draws_depend_on_seed_and_index_alone() -> None:
    straight = draws(selector(20), 0, 60)
    chosen = selector(20)
    assert [chosen.draw(i, frozenset({0, 1})) for i in reversed(range(60))] == straight[::-1]
    assert draws(selector(20, seed=1), 0, 60) != straight


def test_draws_of_existing_runs_stay_the_same_with_and_without_preparation() -> None:
    recorded = [7, 0, 2, 1, 4, 6, 5, 3, 8, 5, 1, 2, 4, 0, 7, 8, 6, 3]
    assert draws(selector(9, seed=3), 0, 18) == recorded
    chosen = selector(9, seed=3)
    chosen.prepare(4, 10)
    assert draws(chosen, 4, 14) == recorded[4:14]
    for first in (17, 0, 9):
        chosen.prepare(first, 1000)
        assert chosen.draw(first, frozenset()) == recorded[first]


def test_prepared_draws_permute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = selector(9)
    chosen.prepare(5, 9)
    monkeypatch.setattr(np.random, "default_rng", lambda *_: pytest.fail("a draw permutes the pool"))
    for _ in range(2):
        assert len(set(draws(chosen, 5, 14))) > 1


def test_restore_refuses_a_snapshot_of_another_selector() -> None:
    chosen = selector(3)
    chosen.restore(chosen.snapshot())
    with pytest.raises(CorruptSnapshot):
        chosen.restore(b"thompson@1")
