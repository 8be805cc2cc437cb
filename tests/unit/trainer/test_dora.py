"""The recipe `dora`: its objective against values by hand, and which samples an update trains."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import FinishReason, Outcome
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.losses import LossSum, token_weights

from .builders import action, group, member, prompt, training_sample
from .test_loss_terms import gradient_of, inputs, logs
from .test_update import trainer

LONGEST = 4


def dora() -> UpdateConfig:
    return config_from_dict(MeshConfig, {"recipe": "dora", "learner": {"normalization_tokens": LONGEST}}).learner


@pytest.mark.row("S012")
def test_the_objective_of_dora_equals_the_hand_computed_value() -> None:
    """Two samples of 2 and 3 tokens and L = 4, so that every token weighs 1 / 8. Ratios pi / prox 2, 2, 3000, 0.5, 0.5
    and weights prox / mu 1, 1, 4, 0.5, 1:

    A = 1:   -1.28 at ratio 2;  A = -1: 2 at ratio 2, not clipped above;  3 at ratio 3000, times 2, the truncated weight
    A = 1:   -0.5 at ratio 0.5, times 0.5;  A = -1: 0.8 at ratio 0.5, clipped below
    """
    config = dora()
    prox = logs(1e-4, 1e-4, 1e-4, 1e-4, 1e-4)
    mu = logs(1e-4, 1e-4, 0.25e-4, 2e-4, 1e-4)
    pi = (prox + logs(2, 2, 3000, 0.5, 0.5)).requires_grad_()
    weight = token_weights([2, 3], [1.0, 1.0], config.normalization, config.normalization_tokens).double()
    made = inputs(pi, mu, [1, -1, -1, 1, -1], [0, 0, 1, 1, 1], proximal=prox, token_weight=weight)
    loss, _ = LossSum(config.loss)(made)
    assert loss.item() == pytest.approx((-1.28 + 2 + 2 * 3 - 0.5 * 0.5 + 0.8) / 8)
    assert gradient_of(loss, pi) == pytest.approx([0, 2 / 8, 0, -0.25 / 8, 0])


@pytest.mark.row("S012")
@pytest.mark.parametrize("ratio", [1e2, 1e9, 1e30])
def test_a_bad_token_has_a_bounded_loss_whatever_its_ratio(ratio: float) -> None:
    prox = logs(1.0)
    pi = (prox + logs(ratio)).requires_grad_()
    loss, _ = LossSum(dora().loss)(inputs(pi, prox - 50.0, [-1], [0], proximal=prox))
    assert loss.item() == pytest.approx(3.0 * 2.0), "the third bound times the largest weight"
    assert gradient_of(loss, pi) == [0.0]


@pytest.mark.row("S012")
def test_an_update_of_dora_trains_neither_truncated_samples_nor_those_of_a_failed_sandbox() -> None:
    """Rewards 1, 0, 1, 0 and a failure. The advantages of the first four are those without it: 1 and -1."""
    stop, cut = FinishReason.STOP, FinishReason.LENGTH
    texts = [([30, 31, 32], stop), ([30, 31] * 3, cut), ([30, 31, 32], cut), ([30, 31] * 3, stop), ([30, 31], stop)]
    samples = [
        training_sample(f"s{i}", [prompt([20]), replace(action(tokens, [-4.7] * len(tokens)), finish=finish)], of="g")
        for i, (tokens, finish) in enumerate(texts)
    ]
    members = [member(f"s{i}", {"r": r}) for i, r in enumerate([1.0, 0.0, 1.0, 0.0])]
    members.append(member("s4", {"r": 0.0}, outcome=Outcome.INFRA_FAILURE))
    context = group("g", *members)
    made = trainer(dora())
    reasons = [verdict.reason for verdict in made.update(1, samples, [context]).verdicts]
    assert reasons == [None, None, "TRUNCATED", None, "UNSCORED"], "the second is truncated, and a loop"
    assert made.plugins.estimator.of_group(context) == pytest.approx({"s0": 1, "s1": -1, "s2": 1, "s3": -1}, rel=1e-4)
