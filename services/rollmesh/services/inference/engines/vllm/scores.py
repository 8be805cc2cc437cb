"""Turn the numbers of a scored sequence into a `ScoreResult`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.inference.engine import EngineBroken, ScoreResult
from rollmesh.services.inference.engines.vllm import columns
from rollmesh.shared.domain.outputs import NO_TOKEN
from rollmesh.shared.domain.versions import PolicyVersion

SCORE_OUTPUTS = ("entropy", "mean_logprob", "top_k")


def num_score_pairs(outputs: tuple[str, ...], num_top: int) -> int:
    """Return the number of pairs beside the given token's that the outputs need."""
    if "top_k" in outputs:
        return columns.SCORE_TOP - 1 + num_top
    return columns.SCORE_MEAN if "mean_logprob" in outputs else columns.SCORE_ENTROPY


def score_result(
    pairs: tuple[NDArray[np.int64], NDArray[np.float64]], version: PolicyVersion, serial: int, outputs: tuple[str, ...]
) -> ScoreResult:
    """Return the result of a sequence of n tokens from ids and values [n - 1, pairs] of the tokens after the first one.

    Raises EngineBroken if other weights than number `serial` scored it.
    """
    ids, values = pairs
    found = set(columns.serials_of(ids[:, columns.SCORE_ENTROPY]).tolist())
    if found - {serial}:
        raise EngineBroken(f"weights {sorted(found)} scored a sequence, not {serial} alone")
    arrays: dict[str, NDArray[Any]] = {}
    if "entropy" in outputs:
        arrays["entropy"] = _after_first(values[:, columns.SCORE_ENTROPY])
    if "mean_logprob" in outputs:
        arrays["mean_logprob"] = _after_first(values[:, columns.SCORE_MEAN])
    if "top_k" in outputs:
        top = columns.top_ids_of(ids[:, columns.SCORE_TOP :])
        arrays["top_k_ids"] = np.concatenate((np.full((1, top.shape[1]), NO_TOKEN, np.int32), top))
        arrays["top_k_logprobs"] = _after_first(values[:, columns.SCORE_TOP :])
    return ScoreResult(logprobs=_after_first(values[:, 0]), version=version, arrays=arrays)


def _after_first(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the rows behind a row of zeros, for the first token."""
    return np.concatenate((np.zeros((1, *rows.shape[1:])), rows)).astype(np.float32)
