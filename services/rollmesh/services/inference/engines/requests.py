"""Checks of a request that all engines share, so that they reject the same requests with the same errors."""

from __future__ import annotations

import numpy as np

from rollmesh.services.inference.engine import GenerateRequest
from rollmesh.shared.trajectory import IntArray, SamplingParams

_SEED_MAX = 2**64


def check_request(request: GenerateRequest, *, vocab_size: int, context_max: int, outputs: frozenset[str]) -> None:
    """Check a request. Raises ValueError naming the request, the field and the remedy."""
    where = f"request {request.request_id!r}"
    check_tokens(request.token_ids, where=where, vocab_size=vocab_size)
    if request.token_ids.shape[0] >= context_max:
        raise ValueError(
            f"{where}: the prefix has {request.token_ids.shape[0]} tokens, which leaves no room in a context of "
            f"{context_max}: shorten it or raise context_max"
        )
    if unknown := set(request.outputs) - outputs:
        raise ValueError(
            f"{where}: outputs must be among [{', '.join(sorted(outputs))}], which this engine can return, got "
            f"[{', '.join(sorted(unknown))}]"
        )
    _check_params(request.params, where=where, vocab_size=vocab_size)


def check_tokens(token_ids: IntArray, *, where: str, vocab_size: int) -> None:
    if token_ids.ndim != 1 or token_ids.shape[0] == 0:
        raise ValueError(f"{where}: token_ids must be a non-empty row, got shape {token_ids.shape}")
    low, high = int(np.min(token_ids)), int(np.max(token_ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{where}: token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")


def _check_params(params: SamplingParams, *, where: str, vocab_size: int) -> None:
    ranges = {
        "temperature": 0.0 <= params.temperature < float("inf"),
        "top_p": 0.0 < params.top_p <= 1.0,
        "top_k": params.top_k >= 0,
        "max_tokens": params.max_tokens >= 1,
        "seed": 0 <= params.seed < _SEED_MAX,
        "stop": all(params.stop),
        "stop_token_ids": all(0 <= token < vocab_size for token in params.stop_token_ids),
    }
    for name, good in ranges.items():
        if not good:
            raise ValueError(f"{where}: {name} is out of range: {getattr(params, name)!r}")
