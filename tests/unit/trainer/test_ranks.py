"""Two ranks in two processes equal one rank: values, gradients and weights after five updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.trainer.packing import pack
from rollmesh.trainer.ranks import ONE_RANK, Ranks
from rollmesh.trainer.samples import build_table
from tests.forked import ForkServer, run_all

from .builders import random_batch
from .rank_worker import OWN, SHARED_PREFIX, config_of, results_of

RECIPES = ["grpo", "grpo_decoupled", "archer", "vcpo"]
"""A clipped loss; a feature under `start`; a critic with a replay buffer; gradients per sample."""
CASES = [*RECIPES, *OWN]
ROOT = Path(__file__).parents[3]
END_S = 280

pytestmark = pytest.mark.timeout(300)


def run_ranks(folder: Path, size: int, *cases: str) -> list[str]:
    """Run the worker on `size` ranks, and return what each has written to its standard error."""
    command = [sys.executable, "-m", "tests.unit.trainer.rank_worker", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            bound_to_parent([*command, str(rank), str(size), *cases]),
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=END_S)[1] for process in running]
    assert [process.returncode for process in running] == [0] * size, errors
    return errors


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(folder, 2, *CASES)
    return folder


def close(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested results within the tolerance of float32 sums in another order."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for name, value in expected.items():
            close(found[name], value, f"{where}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            close(found[index], value, f"{where}[{index}]")
    elif isinstance(expected, (torch.Tensor, np.ndarray, float)):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-3, atol=2e-4, err_msg=where)
    else:
        assert found == expected, where


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_rank(two_ranks: Path, case: str) -> None:
    found = torch.load(two_ranks / f"{case}.pt", weights_only=False)
    expected = results_of(case, ONE_RANK)
    close(found, expected, case)
    assert all(m["steps_taken"] > 0 for m in expected["metrics"])
    assert all((m["tokens/prefix_saved_share"] > 0) == (case == SHARED_PREFIX) for m in found["metrics"])


_ALONE = """
import sys
from datetime import timedelta
from pathlib import Path
from tests.unit.trainer import rank_worker

rank_worker.TIMEOUT_S = 60.0
ranks = rank_worker.join(Path(sys.argv[1]), int(sys.argv[2]), 2)
try:
    if ranks.rank == 0:
        ranks.from_first(lambda: print("made"))
finally:
    rank_worker.dist.destroy_process_group()
"""


def test_rank_0_does_not_wait_for_a_rank_that_has_ended(tmp_path: Path) -> None:
    """Reading a model may take hours, and the wait for the other ranks before it may not."""
    first, other = (
        subprocess.Popen(
            bound_to_parent([sys.executable, "-c", _ALONE, str(tmp_path), str(rank)]),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    assert other.wait(END_S) == 0
    made, error = first.communicate(timeout=END_S)
    assert first.returncode == 1
    assert not made
    assert "by peer" in error or "timed out" in error.lower(), error


def test_every_micro_batch_is_run_once_and_ranks_make_equally_many_forwards() -> None:
    samples, _ = random_batch(3, 3)
    config = config_of("grpo").packing
    plan = pack(build_table(samples, update=1).sequences, config)
    for size in (1, 2, 3, len(plan), len(plan) + 2):
        shares = [Ranks(rank, size).share(plan) for rank in range(size)]
        assert len({len(share) for share in shares}) == 1
        places = torch.cat([batch.target_index for share in shares for batch in share])
        assert sorted(places.tolist()) == list(range(len(places)))
