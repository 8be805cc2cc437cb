"""The fake engine's model: a categorical distribution per position, computed from hashes, without torch.

Logits are a pure function of (weights key, position). So generation and scoring agree to rounding, a new version
changes every log-prob, and many tokens are one vectorized draw. The random stream is keyed by (seed, position) as in
the real engine: SplitMix64 (Steele, Lea, Flood 2014), here with one uniform per position and an inverse CDF.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.outputs import NO_LOGPROB, NO_TOKEN, NUM_TOP
from rollmesh.shared.domain.trajectory import Columns, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion

SCORE_OUTPUTS: tuple[str, ...] = ("entropy", "mean_logprob", "top_k")
OUTPUTS: tuple[str, ...] = ("kept_mass", *SCORE_OUTPUTS)
"""Outputs that follow from the distributions alone. There is no hidden state and no expert here."""
_PERIOD = 64
"""Positions with equal remainders have the same distribution."""
_SPREAD = 4.0
"""Range of the logits, in nats."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)

Floats = NDArray[np.float64]


def mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finalizer, elementwise."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(key: int, counters: NDArray[np.int64]) -> Floats:
    """Return numbers in [0, 1), a pure function of (key, counter)."""
    start = mix64(np.array([key % 2**64], np.uint64) + _GAMMA)
    bits = mix64(start + counters.astype(np.uint64) * _GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class FakePolicy:
    """The distributions of one version."""

    def __init__(self, version: PolicyVersion, vocab_size: int) -> None:
        name = version.weights_digest or f"{version.policy}@{version.step}.{version.incarnation}"
        numbers = uniforms(zlib.crc32(name.encode()), np.arange(_PERIOD * vocab_size)).reshape(_PERIOD, vocab_size)
        self._logits = numbers * _SPREAD
        self._plain = log_softmax(self._logits)

    def logprobs_model(self, token_ids: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        picked: Floats = self._plain[positions % _PERIOD, token_ids]
        return picked.astype(np.float32)

    def measure(self, positions: NDArray[np.int64], outputs: Sequence[str], num_top: int) -> Columns:
        """Return the arrays of `outputs` of the plain softmax at these positions."""
        plain = self._plain[positions % _PERIOD]
        return _measured(plain, plain, np.ones(len(positions)), outputs, num_top)

    def draw(
        self, params: SamplingParams, positions: NDArray[np.int64], outputs: Sequence[str] = (), num_top: int = NUM_TOP
    ) -> tuple[NDArray[np.int32], Columns]:
        """Draw tokens [n] at these positions. Also return columns: `logprobs` [n] under the sampling distribution,
        `logprobs_model` [n] under the plain softmax, and the arrays of `outputs`."""
        rows = np.arange(len(positions))
        kept_mass = np.ones(len(positions))
        if params.temperature == 0.0:
            tokens = self._logits[positions % _PERIOD].argmax(axis=1).astype(np.int32)
            logprobs = self._plain[positions % _PERIOD]
        else:
            tempered = self._logits[positions % _PERIOD] / params.temperature
            logprobs = truncate(tempered, params)
            kept_mass = np.where(np.isfinite(logprobs), np.exp(log_softmax(tempered)), 0.0).sum(axis=1)
            cumulative = np.exp(logprobs).cumsum(axis=1)
            # Scaled by the total, so that rounding cannot move a draw past the last token that has mass.
            marks = uniforms(params.seed, positions)[:, None] * cumulative[:, -1:]
            tokens = (cumulative <= marks).sum(axis=1).astype(np.int32)
        plain = self._plain[positions % _PERIOD]
        columns = {"logprobs": logprobs[rows, tokens], "logprobs_model": plain[rows, tokens]}
        return tokens, {
            **{name: values.astype(np.float32) for name, values in columns.items()},
            **_measured(logprobs, plain, kept_mass, outputs, num_top),
        }


def _measured(logprobs: Floats, plain: Floats, kept_mass: Floats, outputs: Sequence[str], num_top: int) -> Columns:
    """Return the arrays of `outputs` of log-probs [n, vocab], -inf where a token cannot be drawn."""
    drawable = np.isfinite(logprobs)
    bounded = np.where(drawable, logprobs, NO_LOGPROB)
    columns: dict[str, NDArray[Any]] = {}
    if "entropy" in outputs:
        columns["entropy"] = -(np.exp(logprobs) * np.where(drawable, logprobs, 0.0)).sum(axis=1)
    if "kept_mass" in outputs:
        columns["kept_mass"] = np.minimum(kept_mass, 1.0)
    if "mean_logprob" in outputs:
        columns["mean_logprob"] = plain.mean(axis=1)
    if "top_k" in outputs:
        ids = np.argsort(-bounded, axis=1, kind="stable")[:, :num_top]
        top = np.take_along_axis(bounded, ids, axis=1)
        lacking = ((0, 0), (0, num_top - ids.shape[1]))
        columns["top_k_logprobs"] = np.pad(top, lacking, constant_values=NO_LOGPROB)
        ids = np.where(top == NO_LOGPROB, NO_TOKEN, ids).astype(np.int32)
        columns["top_k_ids"] = np.pad(ids, lacking, constant_values=NO_TOKEN)
    return {name: rows.astype(np.float32) if rows.dtype.kind == "f" else rows for name, rows in columns.items()}


def truncate(logits: Floats, params: SamplingParams) -> Floats:
    """Return log-probs [n, vocab] after top-k, then the nucleus, renormalized; -inf outside."""
    if not params.top_k and params.top_p >= 1.0:
        return log_softmax(logits)
    order = np.argsort(-logits, axis=1, kind="stable")
    ordered = np.take_along_axis(logits, order, axis=1)
    if params.top_k:
        ordered[:, params.top_k :] = -np.inf
    probs = np.exp(log_softmax(ordered))
    outside = probs.cumsum(axis=1) - probs >= params.top_p
    outside[:, 0] = False
    ordered[outside & (params.top_p < 1.0)] = -np.inf
    kept = np.empty_like(ordered)
    np.put_along_axis(kept, order, ordered, axis=1)
    return log_softmax(kept)


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
