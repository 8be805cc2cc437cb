"""Two ranks in two processes equal one rank: values, gradients and weights after three updates."""

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

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Path:
    """The results of the worker on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = run_all(
        server, "tests.unit.trainer.rank_worker", folder, [[str(folder), str(n), "2", *CASES] for n in (0, 1)]
    )
    assert [process.returncode for process in ended] == [0, 0], [process.stderr for process in ended]
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


def test_rank_0_does_not_wait_for_a_rank_that_has_ended(tmp_path: Path, server: ForkServer) -> None:
    """Reading a model may take hours, and the wait for the other ranks before it may not."""
    arguments = [[str(tmp_path), str(rank), "2", "--alone"] for rank in (0, 1)]
    first, other = run_all(server, "tests.unit.trainer.rank_worker", tmp_path, arguments)
    assert other.returncode == 0, other.stderr
    assert first.returncode == 1
    assert not first.stdout
    assert "by peer" in first.stderr or "timed out" in first.stderr.lower(), first.stderr


def test_every_micro_batch_is_run_once_and_ranks_make_equally_many_forwards() -> None:
    samples, _ = random_batch(3, 3)
    config = config_of("grpo").packing
    plan = pack(build_table(samples, update=1).sequences, config)
    for size in (1, 2, 3, len(plan), len(plan) + 2):
        shares = [Ranks(rank, size).share(plan) for rank in range(size)]
        assert len({len(share) for share in shares}) == 1
        places = torch.cat([batch.target_index for share in shares for batch in share])
        assert sorted(places.tolist()) == list(range(len(places)))
