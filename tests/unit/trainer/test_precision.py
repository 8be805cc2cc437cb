"""bfloat16 with weights in float32, storage on the host, and the choice of attention."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rollmesh.demo.tiny_model import build_tiny_model
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.precision import dtypes_of
from rollmesh.trainer import forward, sharding
from rollmesh.trainer.checkpoint import latest_checkpoint, save_checkpoint
from rollmesh.trainer.checkpoint_files import CheckpointPosition
from rollmesh.trainer.config import (
    ComputeConfig,
    LossTermChoice,
    OptimizerConfig,
    PackingConfig,
    ParameterGroup,
    ReferenceConfig,
    UpdateConfig,
)
from rollmesh.trainer.forward import logprobs_of
from rollmesh.trainer.model_files import load_model, published_state
from rollmesh.trainer.packing import pack
from rollmesh.trainer.samples import build_table
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import BatchTrainer

from .builders import minibatches, random_batch
from .rank_worker import SMALL

BF16 = ComputeConfig(precision="bfloat16")
TOLERANCE = 0.02
"""Difference of log-probs in bfloat16 from those in float32, in nats: the logits of this model are below 4."""
IDS = np.arange(13, 60, dtype=np.int32)


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    end_process_group()


def settings(compute: ComputeConfig = BF16, **more: Any) -> UpdateConfig:
    chosen: dict[str, Any] = {
        "loss": (LossTermChoice("ppo_clip"), LossTermChoice("kl", weight=0.1)),
        "reference": ReferenceConfig(kind="average", decay=0.5),
        "packing": PackingConfig(row_tokens=64, micro_batch_tokens=128),
        "optimizer": OptimizerConfig(lr=1e-3, warmup_updates=0),
        "compute": compute,
    }
    return UpdateConfig(**(chosen | more))


def make(config: UpdateConfig, model: PreTrainedModel | None = None) -> BatchTrainer:
    return BatchTrainer(model or build_tiny_model(SMALL, seed=1), config, seed=7, outputs=["entropy"])


def end_process_group() -> None:
    """End the process group of trainers that a test has not closed."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sharding._alone.clear()


def trained(config: UpdateConfig, updates: int = 3, model: PreTrainedModel | None = None) -> BatchTrainer:
    made = make(config, model)
    for k in range(1, updates + 1):
        made.update(k, *random_batch(3, 3, seed=k, step=k - 1))
    return made


def change(made: BatchTrainer) -> torch.Tensor:
    before, after = published_state(build_tiny_model(SMALL, seed=1)), published_state(made.model)
    return torch.cat([(after[name] - before[name]).flatten() for name in before])


def test_log_probs_are_those_of_float32_within_rounding() -> None:
    exact, rounded = (make(settings(compute)).score(IDS) for compute in (ComputeConfig(), BF16))
    off = np.abs(exact - rounded).max()
    assert 1e-5 < off < TOLERANCE, "rounded to 8 bits, and to no fewer"


def test_an_update_moves_the_weights_as_in_float32() -> None:
    exact, rounded = change(trained(settings(ComputeConfig()))), change(trained(settings()))
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.99


def test_weights_gradients_and_moments_are_float32_and_the_layers_compute_in_bfloat16() -> None:
    made = make(settings())
    seen: set[torch.dtype] = set()
    for layer in made.model.base_model.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    made.update(1, *random_batch(3, 3, seed=1))
    assert seen == {torch.bfloat16}
    assert all(isinstance(p, DTensor) and p.dtype is torch.float32 for p in made.model.parameters())
    assert {values["exp_avg"].dtype for values in made.optimizer.state.values()} == {torch.float32}
    assert made.reference is not None
    assert {p.dtype for p in made.reference.model.parameters()} == {torch.float32}


def test_small_steps_add_up_in_the_weights_and_are_lost_without_float32() -> None:
    lr = 2e-8  # about 1e-6 of a weight of 0.02
    config = settings(optimizer=OptimizerConfig(lr=lr, warmup_updates=0), update_rule=minibatches(1))
    made = make(config)
    before = published_state(build_tiny_model(SMALL, seed=1))
    pure = [torch.nn.Parameter(values.bfloat16()) for values in before.values()]
    optimizer = torch.optim.AdamW(pure, lr=lr, weight_decay=0.0)
    samples, groups = random_batch(3, 3, seed=1)
    for k in range(1, 51):
        made.update(k, samples, groups)
        for parameter in pure:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = change(made).abs()
    matrices = torch.cat([v.flatten() for v in before.values() if v.ndim == 2]).abs()
    assert float(moved.median()) > 10 * lr
    assert float(moved.max()) < 60 * lr < 1e-3 * float(matrices.median())
    for parameter, start in zip(pure, before.values(), strict=True):
        large = start.abs() > 1e-3
        assert torch.equal(parameter[large], start.bfloat16()[large])


def test_a_resumed_trainer_makes_the_next_update_bit_for_bit(tmp_path: Path) -> None:
    first, log = trained(settings(), updates=0), TrainedLog()
    for k in (1, 2):
        result = first.update(k, *random_batch(3, 3, seed=k, step=k - 1))
        log.append(k, result.used_ids, incarnation=0, outcome=result.outcome.name)
    save_checkpoint(tmp_path, first, None, log, CheckpointPosition(update=2, digest=log.digest, seed=7))
    found = latest_checkpoint(tmp_path)
    assert found is not None
    state = torch.load(found.path / "optimizer.pt", weights_only=True)
    assert all(type(v) is torch.Tensor for values in state["state"].values() for v in values.values())
    second = make(settings(), load_model(found.path))
    found.restore(second)
    for made in (first, second):
        made.update(3, *random_batch(3, 3, seed=3, step=2))
    expected, resumed = published_state(first.model), published_state(second.model)
    assert all(torch.equal(resumed[name], values) for name, values in expected.items())
    third = make(settings(ComputeConfig()), load_model(found.path))
    assert not found.restore(third), "the precision of the computation is not in the optimizer's state"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", ["reference", "optimizer"])
def test_storage_on_the_host_changes_nothing(precision: Any, offload: Any) -> None:
    plain, moved = (trained(settings(ComputeConfig(precision=precision, offload=where))) for where in ("none", offload))
    expected, found = published_state(plain.model), published_state(moved.model)
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    assert plain.reference is not None
    assert moved.reference is not None
    mine, theirs = moved.reference.state(), plain.reference.state()
    assert mine is not None
    assert theirs is not None
    assert all(torch.equal(mine[name], values) for name, values in theirs.items())
    assert all(isinstance(p, DTensor) for p in moved.reference.model.parameters())


def test_the_process_group_of_a_single_rank_ends_with_its_last_trainer() -> None:
    first, second, plain = make(settings()), make(settings()), make(settings(ComputeConfig()))
    first.close()
    first.close()
    plain.close()
    assert np.isfinite(second.score(IDS)).all()
    second.close()
    assert not torch.distributed.is_initialized()


def test_a_trainer_that_cannot_be_made_leaves_no_process_group() -> None:
    unknown = OptimizerConfig(groups=(ParameterGroup(names="absent.*"),))
    with pytest.raises(ConfigError, match="no trainable parameter matches"):
        make(settings(optimizer=unknown))
    assert not torch.distributed.is_initialized()
    other = make(settings())
    with pytest.raises(ConfigError, match="no trainable parameter matches"):
        make(settings(optimizer=unknown))
    assert np.isfinite(other.score(IDS)).all()


def test_a_process_group_of_another_library_is_an_error_and_stays() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"learner\.compute\.precision.*this one has a group of 1"):
        make(settings())
    assert torch.distributed.is_initialized()


def test_trainers_in_two_threads_compute_what_one_alone_does() -> None:
    expected = published_state(trained(settings()).model)
    models = [build_tiny_model(SMALL, seed=1) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda model: trained(settings(), model=model), models))
    for made in both:
        assert all(torch.equal(values, expected[name]) for name, values in published_state(made.model).items())


@pytest.mark.parametrize("chunk_tokens", [0, 8])
def test_gradients_are_those_of_float32_within_rounding(chunk_tokens: int) -> None:
    """Also those of the output layer, to which every part of the positions contributes."""
    gradients = []
    for compute in (ComputeConfig(), msgspec.structs.replace(BF16, logprob_chunk_tokens=chunk_tokens)):
        made = make(settings(compute, update_rule=minibatches(1)))
        found: dict[str, torch.Tensor] = {}
        made.optimizer.step = lambda made=made, found=found: found.update(  # type: ignore[method-assign]
            (name, sharding.whole(p.grad).clone()) for name, p in made.model.named_parameters() if p.grad is not None
        )
        made.update(1, *random_batch(3, 3, seed=1))
        assert {values.dtype for values in found.values()} == {torch.float32}
        gradients.append(found)
    for name, exact in gradients[0].items():
        off = float((gradients[1][name] - exact).norm() / exact.norm())
        assert off < 0.03, name


def test_the_norm_of_the_gradient_and_the_loss_are_those_of_float32_within_rounding() -> None:
    exact, rounded = (
        make(settings(compute, update_rule=minibatches(1))).update(1, *random_batch(3, 3, seed=1)).metrics
        for compute in (ComputeConfig(), BF16)
    )
    assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert rounded["entropy"] == pytest.approx(exact["entropy"], abs=0.01)


def test_exported_weights_are_rounded_on_request_and_compute_the_same(tmp_path: Path) -> None:
    made = trained(settings())
    made.export_weights(tmp_path / "exact.safetensors")
    made.export_weights(tmp_path / "rounded.safetensors", torch.bfloat16)
    assert set(dtypes_of([tmp_path / "exact.safetensors"]).values()) == {"float32"}
    assert set(dtypes_of([tmp_path / "rounded.safetensors"]).values()) == {"bfloat16"}
    assert (tmp_path / "rounded.safetensors").stat().st_size < 0.6 * (tmp_path / "exact.safetensors").stat().st_size


def test_a_model_that_bfloat16_does_not_represent_is_rejected() -> None:
    model = build_tiny_model(SMALL, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.shape == model.get_input_embeddings().weight.shape:
                parameter.add_(20.0)  # bfloat16 has steps of 0.125 there
    make(settings(ComputeConfig()), model)
    with pytest.raises(
        ConfigError, match=r"cannot be trained in bfloat16.*learner\.compute\.precision.*float32"
    ) as error:
        make(settings(), model)
    assert error.value.metadata["key"] == "learner.compute.precision"
    assert not torch.distributed.is_initialized()


def test_rows_as_one_row_give_the_same_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_attention_2 gets micro-batches as one row. The plain attention must compute the same from it."""
    model = build_tiny_model(SMALL, seed=1)
    sequences = build_table(random_batch(3, 3)[0], update=1).sequences
    packing = PackingConfig(row_tokens=64, micro_batch_tokens=256)
    assert any(len(batch.token_ids) > 1 for batch in pack(sequences, packing))
    rows = logprobs_of(model, sequences, packing)
    monkeypatch.setattr(forward, "FLASH", model.config._attn_implementation)
    torch.testing.assert_close(logprobs_of(model, sequences, packing), rows)


def test_an_attention_that_cannot_run_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"`precision` must be bfloat16 with attention: flash_attention_2"):
        ComputeConfig(attention="flash_attention_2")
    with pytest.raises(
        ConfigError, match=r"learner\.compute\.attention.*flash-attn and a CUDA device, got the device cpu"
    ) as error:
        make(settings(msgspec.structs.replace(BF16, attention="flash_attention_2")))
    assert error.value.metadata["key"] == "learner.compute.attention"
    assert make(settings(ComputeConfig(attention="sdpa"))).model.config._attn_implementation == "sdpa"


def test_an_optimizer_in_8_bits_does_not_combine_with_it() -> None:
    with pytest.raises(ValueError, match=r"`optimizer\.kind` must be adamw.*bfloat16"):
        settings(optimizer=OptimizerConfig(kind="adamw_8bit"))
