"""The memory plan and the logits in parts on a CUDA device.

pytest -m gpu tests/gpu/test_trainer_memory.py
"""

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.trainer.config import ComputeConfig
from rollmesh.trainer.memory_plan import plan_memory
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.update import BatchTrainer

from ..unit.trainer import measured_peak
from ..unit.trainer.builders import action, group, member, prompt, training_sample
from ..unit.trainer.measured_peak import CONFIG, LENGTH, ROWS, VOCABULARY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def peak_bytes(compute: ComputeConfig) -> int:
    """Return the growth of the allocated memory of the device while a model trains for two updates."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = AutoModelForCausalLM.from_config(CONFIG).to("cuda:0")  # type: ignore[no-untyped-call]
    trainer = BatchTrainer(model, msgspec.structs.replace(measured_peak.settings(), compute=compute), seed=0)
    rng = np.random.default_rng(0)
    samples = [
        training_sample(
            f"s{n}", [prompt([7]), action(rng.integers(5, VOCABULARY, LENGTH - 1).tolist(), [-9.7] * (LENGTH - 1))]
        )
        for n in range(2 * ROWS)
    ]
    members = [member(s.sample.sample_id, {"correct": float(n % 2)}, of=s) for n, s in enumerate(samples)]
    for k in (1, 2):
        trainer.update(k, samples, [group("g0", *members)])
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunk_tokens", [0, 128])
def test_the_plan_is_within_a_fifth_of_the_allocated_peak(chunk_tokens: int, checkpointing: bool) -> None:
    compute = ComputeConfig(logprob_chunk_tokens=chunk_tokens, gradient_checkpointing=checkpointing)
    config = msgspec.structs.replace(measured_peak.settings(), compute=compute)
    assert 0.8 < plan_memory(config, CONFIG, Plugins(config)).total / peak_bytes(compute) < 1.2


def test_parts_need_a_fraction_of_the_memory() -> None:
    at_once, in_parts = (peak_bytes(ComputeConfig(logprob_chunk_tokens=n)) for n in (0, 128))
    assert in_parts < at_once / 2
