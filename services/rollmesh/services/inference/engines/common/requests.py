"""Checks of a request that all engines share, so that they reject the same requests with the same errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from rollmesh.services.inference.engine import Engine, GenerateRequest
from rollmesh.shared.domain.outputs import NUM_TOP_MAX
from rollmesh.shared.domain.trajectory import IntArray, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion

_SEED_MAX = 2**64


def check_request(
    request: GenerateRequest, engine: Engine, *, vocab_size: int, is_live: Callable[[str], bool] = lambda _: False
) -> None:
    """Check a request to `engine`. `is_live` tells whether an id is in use. Raises ValueError naming the request, field
    and remedy."""
    where = f"request {request.request_id!r}"
    check_tokens(request.token_ids, where=where, vocab_size=vocab_size)
    if request.token_ids.shape[0] >= engine.context_max:
        raise ValueError(
            f"{where}: the prefix has {request.token_ids.shape[0]} tokens, which leaves no room in a context of "
            f"{engine.context_max}: shorten it or raise context_max"
        )
    _check_outputs(request.outputs, request.num_top, engine.capabilities.outputs, where=where)
    if request.version is not None and request.version not in engine.held:
        raise ValueError(f"{where}: {request.version} is not held, held are [{', '.join(map(str, engine.held))}]")
    _check_params(request.params, where=where, vocab_size=vocab_size)
    if is_live(request.request_id):
        raise ValueError(f"{where} is running already: ids must be unique among live requests")


def check_score(
    sequences: Sequence[IntArray],
    engine: Engine,
    *,
    vocab_size: int,
    version: PolicyVersion | None,
    outputs: tuple[str, ...],
    num_top: int,
) -> None:
    """Check the arguments of `score`. Raises ValueError."""
    check_sequences(sequences, engine, vocab_size=vocab_size)
    _check_outputs(outputs, num_top, engine.capabilities.score_outputs, where="score")
    if engine.active is None:
        raise ValueError("no weights are active: prepare and activate a version first")
    if version is not None and version not in engine.held:
        raise ValueError(f"{version} is not held, held are [{', '.join(map(str, engine.held))}]")


def check_sequences(sequences: Sequence[IntArray], engine: Engine, *, vocab_size: int) -> None:
    """Check token rows that `engine` should score. Raises ValueError."""
    for index, sequence in enumerate(sequences):
        check_tokens(sequence, where=f"sequence {index}", vocab_size=vocab_size)
        if len(sequence) > engine.context_max:
            raise ValueError(f"sequence {index} has {len(sequence)} tokens, more than context_max {engine.context_max}")


def check_retain(retain: Collection[PolicyVersion], engine: Engine, version: PolicyVersion) -> None:
    """Check the versions that an activation of `version` must keep. Raises ValueError if they are too many."""
    kept = [held for held in engine.held if held in retain and held != version]
    if len(kept) >= engine.capabilities.versions_max:
        raise ValueError(
            f"at most {engine.capabilities.versions_max - 1} older versions can be retained, got {len(kept)}: retain "
            "fewer or raise versions_max"
        )


def _check_outputs(outputs: tuple[str, ...], num_top: int, known: tuple[str, ...], *, where: str) -> None:
    if unknown := set(outputs) - set(known):
        raise ValueError(
            f"{where}: outputs must be among [{', '.join(sorted(known))}], which this engine can return, got "
            f"[{', '.join(sorted(unknown))}]"
        )
    if not 1 <= num_top <= NUM_TOP_MAX:
        raise ValueError(f"{where}: num_top must be in [1, {NUM_TOP_MAX}], got {num_top}")


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
