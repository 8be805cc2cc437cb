"""The engine is correct for every architecture that it accepts, with its decoder or through transformers, and rejects
the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.update import BatchTrainer
from tests.models.architectures import ARCHITECTURES, build_model
from tests.models.engine_column import EngineResult, engine_result
from tests.models.output_check import check_outputs

FAST = {
    "llama_llama3_rope": "built_in",
    "qwen2": "built_in",
    "qwen3": "built_in",
    "mistral": "built_in",
    "mistral_window": "cached",
    "gemma2_softcap": "cached",
    "gemma3": "cached",
    "qwen3_moe": "cached",
    "gpt2": "cached",
    "falcon_alibi": "cached",
}


def _checked(name: str) -> EngineResult:
    result = engine_result(name)
    assert result.logprob_error < 1e-4, result
    return result


@pytest.mark.parametrize("name", FAST)
def test_the_engine_computes_what_the_plain_forward_computes(name: str) -> None:
    assert _checked(name).forward == FAST[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_architecture_is_served_wrong(name: str) -> None:
    _checked(name)


@pytest.mark.parametrize("name", ["gemma2_softcap", "qwen3_moe", "gpt_oss", "bert"])
def test_every_output_is_that_of_the_plain_forward(name: str) -> None:
    check_outputs(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_architecture_has_a_wrong_output(name: str) -> None:
    check_outputs(name)


def test_trainer_caps_attention_scores_as_the_engine_does() -> None:
    """The default attention of transformers omits the cap, so trainer and probes would agree on another model than the
    published one."""
    model: Any = build_model("gemma2_softcap")
    tokens = np.arange(1, 30, dtype=np.int32)
    with torch.no_grad():
        default = model(torch.tensor(tokens[None], dtype=torch.long)).logits
    scored = BatchTrainer(model, UpdateConfig(), seed=0).score(tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor(tokens[None], dtype=torch.long)).logits
    expected = torch.log_softmax(logits[0, :-1], -1)[torch.arange(28), torch.tensor(tokens[1:], dtype=torch.long)]
    np.testing.assert_allclose(scored[1:], expected.numpy(), atol=1e-5)
    assert (default - logits).abs().max() > 0.01
