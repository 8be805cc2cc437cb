"""Schedule, guarded step, and Muon."""

from typing import Any

import pytest
import torch
from torch import nn

from rollmesh.demo.muon import Muon, orthogonalize
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import OptimizerConfig, ParameterGroup
from rollmesh.trainer.optim import guarded_step, lr_at, make_optimizer, set_lr


def test_learning_rate_warms_up_and_decays_linearly() -> None:
    config = OptimizerConfig(lr=1.0, warmup_updates=4, decay_updates=100, final_fraction=0.1)
    assert lr_at(config, 1) == pytest.approx(0.25)
    assert lr_at(config, 4) == pytest.approx(1 - 0.9 * 0.03)
    assert lr_at(config, 51) == pytest.approx(1 - 0.9 * 0.5)
    assert lr_at(config, 101) == lr_at(config, 5000) == pytest.approx(0.1)


def test_learning_rate_is_constant_without_decay() -> None:
    config = OptimizerConfig(lr=1.0, warmup_updates=0)
    assert lr_at(config, 1) == lr_at(config, 1000) == 1.0


def test_cosine_decay_is_half_a_period() -> None:
    config = OptimizerConfig(lr=2.0, warmup_updates=0, decay="cosine", decay_updates=60, final_fraction=0.5)
    # lr * (1 - (1 - final) * (1 - cos(pi * done)) / 2) at done = 0, 1/3, 1/2, 1
    assert [lr_at(config, k) for k in (1, 21, 31, 61, 99)] == pytest.approx([2.0, 1.75, 1.5, 1.0, 1.0])


def test_cosine_decay_requires_its_length() -> None:
    with pytest.raises(ValueError, match="decay: cosine` requires `decay_updates`"):
        OptimizerConfig(decay="cosine")


def test_groups_have_their_rates_and_decays() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "layer": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    config = OptimizerConfig(
        weight_decay=0.1,
        groups=(ParameterGroup(names="embed.*", lr_factor=0.0), ParameterGroup(names="head.*", weight_decay=0.3)),
    )
    optimizer = make_optimizer(model, config)
    set_lr(optimizer, 0.5)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert {name: found[id(p)] for name, p in model.named_parameters()} == {
        "embed.weight": (0.0, 0.1),
        "layer.weight": (0.5, 0.1),
        "layer.bias": (0.5, 0.0),
        "head.weight": (0.5, 0.3),
        "head.bias": (0.5, 0.3),
    }


def test_a_group_that_matches_nothing_is_an_error() -> None:
    config = OptimizerConfig(groups=(ParameterGroup(names="*"), ParameterGroup(names="weight")))
    with pytest.raises(ConfigError, match=r"groups\[1\].names`: no trainable parameter matches 'weight'"):
        make_optimizer(layer(), config)


@pytest.mark.slow  # it compiles its kernel, 40 s
def test_8_bit_moments_step_nearly_as_32_bit_ones() -> None:
    pytest.importorskip("torchao")
    moved = []
    for kind in ("adamw", "adamw_8bit"):
        torch.manual_seed(0)
        module = nn.Linear(128, 64, bias=False)
        before = module.weight.detach().clone()
        optimizer = make_optimizer(module, OptimizerConfig(kind=kind, lr=0.1))
        for step in range(5):
            set_lr(optimizer, 0.01 * (step + 1))
            torch.manual_seed(step)
            (module(torch.randn(8, 128)) ** 2).sum().backward()
            assert guarded_step(optimizer, clip_norm=1.0, loss=0.0) is not None
        moved.append((module.weight.detach() - before).flatten())
    full, small = moved
    assert torch.nn.functional.cosine_similarity(full, small, dim=0) > 0.99
    assert float(small.norm()) == pytest.approx(float(full.norm()), rel=0.02)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_step_clips_the_global_norm_and_reports_it_unclipped() -> None:
    module = layer()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    norm = guarded_step(optimizer, clip_norm=1.0, loss=0.0)
    assert norm == pytest.approx(8**0.5)
    moved = torch.cat([(p - b).flatten() for p, b in zip(module.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(1.0, abs=1e-4)


def test_modules_of_loss_terms_have_a_norm_of_their_own() -> None:
    """Gradients of 1 in the policy (norm sqrt 8) and of 100 in the module: each part is scaled to a norm of 1."""
    policy, module = layer(), layer()
    groups: list[dict[str, Any]] = [
        {"params": list(policy.parameters())},
        {"params": list(module.parameters()), "modules": True},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    before = [p.detach().clone() for part in (policy, module) for p in part.parameters()]
    for part, gradient in ((policy, 1.0), (module, 100.0)):
        for p in part.parameters():
            p.grad = torch.full_like(p, gradient)
    assert guarded_step(optimizer, clip_norm=1.0, loss=0.0) == pytest.approx(8**0.5)
    moved = [
        torch.cat([(p - b).flatten() for p, b in zip(part.parameters(), old, strict=True)]).norm().item()
        for part, old in ((policy, before[:2]), (module, before[2:]))
    ]
    assert moved == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.parametrize(("gradient", "loss"), [(float("nan"), 0.0), (float("inf"), 0.0), (1.0, float("nan"))])
def test_a_non_finite_step_is_not_taken(gradient: float, loss: float) -> None:
    module = layer()
    optimizer = make_optimizer(module, OptimizerConfig())
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.full_like(p, gradient)
    assert guarded_step(optimizer, clip_norm=1.0, loss=loss) is None
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in module.parameters())


def test_weight_decay_spares_vectors() -> None:
    module = layer()
    optimizer = make_optimizer(module, OptimizerConfig(weight_decay=0.5, lr=0.1))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(module.bias, before["bias"])
    torch.testing.assert_close(module.weight, before["weight"] * 0.95)


@pytest.mark.parametrize("shape", [(4, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_orthogonalize_pushes_singular_values_towards_one(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(shape, generator=generator)
    out = orthogonalize(matrices)
    values = torch.linalg.svdvals(out)
    assert out.shape == matrices.shape
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert float((out * (u @ vh)).sum() / (out.norm() * (u @ vh).norm())) > 0.97


def test_muon_steps_alike_batched_or_alone() -> None:
    torch.manual_seed(0)
    pair = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    alone = [nn.Parameter(p.detach().clone()) for p in pair]
    gradients = [torch.randn(6, 4) for _ in range(2)]
    batched, single = Muon(pair, lr=0.1), [Muon([p], lr=0.1) for p in alone]
    for _ in range(3):
        for p, q, g in zip(pair, alone, gradients, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        batched.step()
        for optimizer in single:
            optimizer.step()
    for p, q in zip(pair, alone, strict=True):
        torch.testing.assert_close(p, q)


def test_muon_first_step_has_the_documented_size() -> None:
    weight = nn.Parameter(torch.zeros(16, 4))
    weight.grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    update = orthogonalize((weight.grad * 1.95)[None])[0]
    Muon([weight], lr=0.1, momentum=0.95).step()
    torch.testing.assert_close(weight.detach(), -0.1 * 2.0 * update)


def test_muon_rejects_vectors() -> None:
    with pytest.raises(ValueError, match="must be matrices"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", 0.0), ("lr", float("nan")), ("clip_norm", -1.0), ("warmup_updates", -1), ("final_fraction", 1.5)],
)
def test_optimizer_config_rejects_values_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be "):
        OptimizerConfig(**{field: value})  # type: ignore[arg-type]
