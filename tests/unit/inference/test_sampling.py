"""The random stream and the distributions drawn from it."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.services.inference.engines.common.sampling import (
    Rules,
    half,
    measure,
    mix64,
    most_likely,
    sample,
    stream_starts,
    uniforms,
)


def rules(num: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 11) -> Rules:
    return Rules(
        streams=stream_starts(torch.full((num,), seed), torch.arange(num)),
        temperature=torch.full((num,), temperature),
        top_p=torch.full((num,), top_p),
        top_k=torch.full((num,), top_k),
        any_tempered=temperature != 1.0,
        any_truncated=top_p < 1.0 or top_k > 0,
        any_greedy=temperature == 0.0,
        outputs=[],
        num_top=0,
    )


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = counts.sum() * probs
    return float(((counts - expected) ** 2 / expected).sum())


def test_mix64_equals_the_reference_splitmix64() -> None:
    def reference(z: int) -> int:
        mask = 2**64 - 1
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    inputs = [0, 1, 0x9E3779B97F4A7C15, 2**63, 2**64 - 1]
    signed = torch.from_numpy(np.array(inputs, np.uint64).astype(np.int64))
    assert [int(z) % 2**64 for z in mix64(signed)] == [reference(z) for z in inputs]


@pytest.mark.parametrize("axis", ["seed", "position", "vocabulary"])
def test_uniforms_are_flat_and_independent_along_each_axis(axis: str) -> None:
    n, zero = 64_000, torch.zeros(64_000, dtype=torch.int64)
    draws = {
        "seed": lambda: uniforms(stream_starts(torch.arange(n), zero), 1)[:, 0],
        "position": lambda: uniforms(stream_starts(zero, torch.arange(n)), 1)[:, 0],
        "vocabulary": lambda: uniforms(stream_starts(zero[:1], zero[:1]), n)[0],
    }[axis]().double()
    counts = np.histogram(draws.numpy(), bins=64, range=(0, 1))[0]
    assert chi_square(counts, np.full(64, 1 / 64)) < 110  # 63 degrees of freedom: p = 0.0002
    adjacent = np.corrcoef(draws[:-1].numpy(), draws[1:].numpy())[0, 1]
    assert abs(adjacent) < 4 / n**0.5


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.7, 0), (1.0, 1.0, 5), (1.5, 0.8, 6)]
)
def test_draws_follow_the_stated_distribution(temperature: float, top_p: float, top_k: int) -> None:
    n = 40_000
    row = torch.linspace(2.0, -2.0, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    tokens, columns = sample(row.expand(n, -1), rules(n, temperature=temperature, top_p=top_p, top_k=top_k))
    probs = np.exp(row.double().numpy() / temperature)
    order = np.argsort(-probs)[: top_k or None]
    kept = probs[order] / probs[order].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(kept), top_p)) + 1]
    order, kept = order[: len(kept)], kept / kept.sum()
    counts = np.bincount(tokens.numpy(), minlength=12)
    assert counts[order].sum() == n
    assert chi_square(counts[order], kept) < 38  # at most 11 degrees of freedom: p < 0.0001
    np.testing.assert_allclose(
        columns["logprobs"][:50].exp(), kept[[list(order).index(t) for t in tokens[:50]]], rtol=1e-4
    )


def test_greedy_rows_take_the_mode_and_report_the_plain_model() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(1))
    tokens, columns = sample(logits, rules(6, temperature=0.0, top_p=0.1, top_k=1))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(columns["logprobs"], logits.log_softmax(-1).max(-1).values)
    torch.testing.assert_close(columns["logprobs"], columns["logprobs_model"])


def test_rows_are_drawn_independently_of_other_rows() -> None:
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(2))
    whole = rules(8, temperature=0.9, top_p=0.9, seed=2**62)
    tokens, _ = sample(logits, whole)
    for row in range(8):
        alone = whole._replace(
            **{name: getattr(whole, name)[row : row + 1] for name in ("streams", "temperature", "top_p", "top_k")}
        )
        assert int(sample(logits[row : row + 1], alone)[0]) == int(tokens[row])


@pytest.mark.row("S075")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, math.log(8) * 0.5 + math.log(2) * 0.5),  # p = 1/2, then 4 times 1/8
        ({"top_k": 1}, 0.0),
        ({"top_p": 0.6}, -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))),  # the nucleus is 1/2 and 1/8, renormalized
        ({"temperature": 0.0}, math.log(8) * 0.5 + math.log(2) * 0.5),
    ],
)
def test_entropy_is_that_of_the_sampling_distribution(options: dict[str, Any], expected: float) -> None:
    logits = torch.tensor([[0.5, 0.125, 0.125, 0.125, 0.125]]).log().expand(3, -1)
    _, columns = sample(logits, rules(3, **options)._replace(outputs=["entropy"]))
    assert columns["entropy"].tolist() == pytest.approx([expected] * 3, abs=1e-6)
    assert "entropy" not in sample(logits, rules(3, **options))[1]


HALVES = [0.5, 0.125, 0.125, 0.125, 0.125]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1.0),
        ({"top_k": 3}, 0.75),
        ({"top_p": 0.6}, 0.625),  # the nucleus is 1/2 and 1/8
        ({"top_k": 3, "top_p": 0.7}, 0.625),  # of 3/4, the first two have 5/6
        ({"temperature": 0.5, "top_k": 1}, 0.8),  # 1/4 of 1/4 + 4/64
        ({"temperature": 0.0, "top_k": 1}, 1.0),
    ],
)
def test_kept_mass_is_that_of_the_kept_tokens_under_the_tempered_softmax(
    options: dict[str, Any], expected: float
) -> None:
    logits = torch.tensor([HALVES]).log().expand(3, -1)
    _, columns = sample(logits, rules(3, **options)._replace(outputs=["kept_mass"]))
    assert columns["kept_mass"].tolist() == pytest.approx([expected] * 3, abs=1e-6)


def test_rows_with_and_without_truncation_in_one_batch_have_their_own_outputs() -> None:
    both = rules(3, top_k=2)._replace(
        top_k=torch.tensor([2, 0, 2]),
        temperature=torch.tensor([1.0, 1.0, 0.0]),
        any_greedy=True,
        outputs=["kept_mass", "top_k", "entropy"],
        num_top=3,
    )
    _, columns = sample(torch.tensor([[0.1, 0.6, 0.3]]).log().expand(3, -1), both)
    assert columns["kept_mass"].tolist() == pytest.approx([0.9, 1.0, 1.0])
    assert columns["top_k_ids"].tolist() == [[1, 2, -1], [1, 2, 0], [1, 2, 0]]
    assert columns["top_k_logprobs"][0].tolist() == pytest.approx([math.log(2 / 3), math.log(1 / 3), -1e30])
    assert columns["top_k_logprobs"][1].exp().tolist() == pytest.approx([0.6, 0.3, 0.1])
    assert columns["entropy"][0] == pytest.approx(math.log(3) - 2 / 3 * math.log(2))
    assert columns["entropy"][1] == columns["entropy"][2]


def test_places_beyond_the_vocabulary_have_no_token() -> None:
    ids, logprobs = most_likely(torch.tensor([[0.25, 0.75]]).log(), 4)
    assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    assert ids.tolist() == [[1, 0, -1, -1]]
    assert logprobs[0].tolist() == pytest.approx([math.log(0.75), math.log(0.25), -1e30, -1e30])


def test_a_token_too_unlikely_to_be_drawn_in_float32_still_has_its_logprob() -> None:
    ids, logprobs = most_likely(torch.tensor([[0.0, -200.0]]), 2)
    assert (ids.tolist(), logprobs.tolist()) == ([[0, 1]], [[0.0, -200.0]])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_mean_logprob_is_that_of_the_plain_softmax(temperature: float) -> None:
    logits = torch.tensor([HALVES]).log() + 3.0
    _, columns = sample(logits, rules(1, temperature=temperature, top_k=1)._replace(outputs=["mean_logprob"]))
    assert columns["mean_logprob"].tolist() == pytest.approx([(math.log(0.5) + 4 * math.log(0.125)) / 5])
    masked = torch.tensor([[0.0, -math.inf]])
    assert measure(masked, torch.tensor([0]), ["mean_logprob"], 1)["mean_logprob"].isfinite().all()


def test_measure_has_the_plain_softmax_of_given_tokens() -> None:
    columns = measure(torch.tensor([HALVES, HALVES[::-1]]).log(), torch.tensor([1, 4]), ["entropy", "top_k"], 2)
    assert columns["logprobs"].exp().tolist() == pytest.approx([0.125, 0.5])
    assert columns["entropy"].tolist() == pytest.approx([math.log(8) * 0.5 + math.log(2) * 0.5] * 2)
    assert columns["top_k_ids"][:, 0].tolist() == [0, 4]
    assert set(columns) == {"logprobs", "entropy", "top_k_ids", "top_k_logprobs"}


def test_states_beyond_float16_are_finite() -> None:
    assert half(torch.tensor([1e6, -1e6, 0.5])).tolist() == [65504.0, -65504.0, 0.5]
