"""bfloat16, storage on the host and flash attention on a CUDA device.

pytest -m gpu tests/gpu/test_trainer_precision.py
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.import_utils import is_flash_attn_2_available

from rollmesh.demo.tiny_model import build_tiny_model
from rollmesh.trainer.config import ComputeConfig
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.update import BatchTrainer

from ..unit.trainer.builders import random_batch
from ..unit.trainer.rank_worker import SMALL
from ..unit.trainer.test_precision import IDS, TOLERANCE, end_process_group, settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    end_process_group()


def trained(**compute: Any) -> BatchTrainer:
    made = BatchTrainer(
        build_tiny_model(SMALL, seed=1).to("cuda:0"),  # type: ignore[arg-type]
        settings(ComputeConfig(**compute)),
        seed=7,
        outputs=["entropy"],
    )
    for k in (1, 2, 3):
        made.update(k, *random_batch(3, 3, seed=k, step=k - 1))
    return made


def test_log_probs_in_bfloat16_are_those_of_float32_within_rounding() -> None:
    exact, rounded = (trained(precision=precision).score(IDS) for precision in ("float32", "bfloat16"))
    assert 1e-5 < np.abs(exact - rounded).max() < 2 * TOLERANCE


@pytest.mark.parametrize("offload", ["reference", "optimizer"])
def test_storage_on_the_host_changes_the_weights_within_rounding(offload: str) -> None:
    plain, moved = (published_state(trained(offload=where).model) for where in ("none", offload))
    for name, values in plain.items():
        torch.testing.assert_close(moved[name], values, rtol=1e-3, atol=2e-4)


def test_weights_on_the_host_are_in_its_memory() -> None:
    made = trained(offload="optimizer", precision="bfloat16")
    assert made.device.type == "cuda"
    assert {p.device.type for p in made.model.parameters()} == {"cpu"}


@pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs the package flash-attn")
def test_flash_attention_computes_the_log_probs_of_the_plain_one() -> None:
    plain, flash = (trained(precision="bfloat16", attention=name) for name in ("sdpa", "auto"))
    assert flash.model.config._attn_implementation == "flash_attention_2"
    assert np.abs(plain.score(IDS) - flash.score(IDS)).max() < 2 * TOLERANCE
