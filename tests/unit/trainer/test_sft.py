"""The warm start on a task small enough to learn in seconds: copy a digit through a tool call."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollmesh.demo.chat import EncodedDemonstration, render_demonstration
from rollmesh.demo.sft import (
    WarmStartConfig,
    WarmStartFailed,
    WarmStartProgress,
    demonstration_probability,
    warm_start,
)
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.trainer.model_files import published_state

TOKENIZER = build_tokenizer()
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
QUICK = WarmStartConfig(levels=2, levels_first=1, promote_loss=1.2, target_success=0.5, steps_max=200, evaluate_every=5)


def demonstrate(level: int, rng: np.random.Generator) -> EncodedDemonstration:
    """Return a demonstration. At level n, the question repeats a digit n times, and the answer calls the tool with it n
    times."""
    digit = str(rng.integers(0, 3))
    return render_demonstration(TOKENIZER, digit * level, [(digit, digit)] * level, digit)


VALIDATION = [demonstrate(level, np.random.default_rng(level)) for level in (1, 2) for _ in range(8)]


def evaluate(model: PreTrainedModel) -> float:
    return demonstration_probability(model, VALIDATION)


def test_warm_start_climbs_the_ladder_and_stops_at_the_target() -> None:
    model = build_tiny_model(SMALL, seed=0)
    seen: list[WarmStartProgress] = []
    before = evaluate(model)
    last = warm_start(model, demonstrate, evaluate, QUICK, seed=0, on_step=seen.append)
    assert before < 0.01
    assert last.success is not None
    assert last.success >= 0.5
    assert evaluate(model) == pytest.approx(last.success)
    assert [p.level for p in seen] == sorted(p.level for p in seen)
    assert (seen[0].level, seen[-1].level) == (1, 2)
    promoted = next(p for p in seen if p.level == 2)
    assert all(p.loss_smoothed >= 1.2 for p in seen if p.step < promoted.step - 1)
    assert seen[-1].loss < seen[0].loss / 4


def test_warm_start_is_deterministic() -> None:
    states = []
    for _ in range(2):
        model = build_tiny_model(SMALL, seed=0)
        warm_start(model, demonstrate, lambda _: 1.0, QUICK, seed=3)
        states.append(published_state(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_warm_start_says_where_it_stood_when_it_gives_up() -> None:
    config = WarmStartConfig(levels=2, levels_first=1, steps_max=3)
    with pytest.raises(WarmStartFailed, match=r"below 0.45 in 3 steps \(level 1 of 2"):
        warm_start(build_tiny_model(SMALL, seed=0), demonstrate, evaluate, config, seed=0)


def test_demonstration_probability_is_the_product_over_trained_tokens() -> None:
    model = build_tiny_model(SMALL, seed=0)
    demo = VALIDATION[0]
    with torch.no_grad():
        logits = model(torch.as_tensor(demo.token_ids).long()[None]).logits[0].double()
    logprobs = logits.log_softmax(-1)
    expected = 1.0
    for i in np.flatnonzero(demo.loss_mask):
        expected *= float(logprobs[i - 1, demo.token_ids[i]].exp())
    assert demonstration_probability(model, [demo]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("field", "value"), [("levels_first", 9), ("muon_lr", 0.0), ("target_success", 1.5), ("steps_max", 0)]
)
def test_warm_start_config_rejects_values_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be"):
        WarmStartConfig(**{field: value})  # type: ignore[arg-type]
