"""The trainer is correct for every architecture that it accepts, packed or unpacked, and rejects the others by name."""

from __future__ import annotations

import pytest
import torch

from rollmesh.trainer import spread_model
from rollmesh.trainer.forward import ForwardMode
from rollmesh.trainer.model_config import auto_class
from rollmesh.trainer.self_test import spread_difference
from tests.models.architectures import ARCHITECTURES, build_model, wide_config
from tests.models.trainer_column import trainer_result

FAST = {
    "mistral_window": ForwardMode.PACKED,
    "gemma2": ForwardMode.PACKED,
    "gemma2_softcap": ForwardMode.PACKED,
    "granite_scaled": ForwardMode.PACKED,
    "gpt_oss": ForwardMode.UNPACKED,
    "lfm2": ForwardMode.UNPACKED,
    "bloom": ForwardMode.UNPACKED,
    "gemma3_multimodal": ForwardMode.PACKED,
    "phi3_longrope": ForwardMode.UNPACKED,
}
"""One model for each way in which a packed forward can be wrong."""
CAPPED_OR_SCALED = (
    "gemma2_default",
    "vaultgemma_default",
    "nanochat",
    "granite_scaled",
    "cohere_scaled",
    "hyperclovax_scaled",
    "minicpm3",
)
"""Models whose logits are changed after the output layer, by values that have little effect on fresh weights."""

NOT_NARROWED = ("mamba2", "zamba2")
"""Models that fit no cut of their width: the sizes of their recurrent layers follow from several others."""


def _check(name: str) -> ForwardMode | None:
    result = trainer_result(name)
    assert result.logprob_error < 1e-4, result
    assert result.gradient_error < 1e-3, result
    return result.mode


@pytest.mark.parametrize("name", FAST)
def test_the_trainer_computes_what_the_plain_forward_computes(name: str) -> None:
    assert _check(name) is FAST[name]


@pytest.mark.parametrize("name", CAPPED_OR_SCALED)
def test_the_choice_on_fresh_weights_is_right_when_they_have_grown(name: str) -> None:
    result = trainer_result(name, grown=6.0)
    assert result.logprob_error < 1e-5, result
    assert result.mode is ForwardMode.PACKED


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_choice_on_fresh_weights_is_wrong_when_they_have_grown(name: str) -> None:
    assert trainer_result(name, grown=6.0).logprob_error < 1e-5


def _check_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut of a wide model is as small as the model of the tests, and packed and plain forward differ on both or on
    neither."""
    small = build_model(name)
    expected = spread_difference(spread_model.SpreadCopy(small))
    monkeypatch.setattr(spread_model, "_WHOLE_PARAMETERS", 0)
    monkeypatch.setattr(spread_model, "_INNER", 48)
    config = wide_config(name, 8)
    with torch.device("meta"):
        wide = auto_class(config).from_config(config)
    cut = spread_model.SpreadCopy(wide, torch.device("cpu"))
    assert bool(spread_difference(cut)) is bool(expected), (spread_difference(cut), expected)
    if name not in NOT_NARROWED:
        assert cut.model.num_parameters() < wide.num_parameters() / 8


@pytest.mark.parametrize("name", [*FAST, "deepseek_v3", "minicpm3", "mixtral"])
def test_the_cut_of_a_wide_model_gives_the_same_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_cut(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_cut_of_any_wide_model_gives_the_same_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_cut(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_architecture_is_silently_wrong(name: str) -> None:
    _check(name)


def test_the_table_is_large_enough() -> None:
    assert len({model_type for model_type, _ in ARCHITECTURES.values()}) >= 60
