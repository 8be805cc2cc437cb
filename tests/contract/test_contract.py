"""Random sequences of valid and invalid calls agree with an independent model of the contract; the suite contract is
longer."""

from __future__ import annotations

from pathlib import Path

from .mesh import quiet_mesh
from .player import Plan
from .sequences import play_all, to_text

SEQUENCES = 12
CALLS = 45


async def test_random_sequences_agree_with_the_model_of_the_contract(tmp_path: Path) -> None:
    async with quiet_mesh(tmp_path) as ends:
        results = await play_all(ends, [Plan(seed, CALLS) for seed in range(SEQUENCES)], parallel=4)
    assert not [result for result in results if result.violation], to_text(results)
    assert sum(result.updates for result in results) >= SEQUENCES
    assert sum(result.rejected for result in results) >= SEQUENCES
    assert sum(result.withheld for result in results) >= 1
    assert sum(result.dropped for result in results) >= SEQUENCES // 2
    assert sum(result.submitted for result in results) >= SEQUENCES // 2
    assert sum(result.given for result in results) >= 1
