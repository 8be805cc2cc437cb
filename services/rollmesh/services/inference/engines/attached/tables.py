"""What the attached servers share in reading responses and in checking the served model."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.services.inference.engines.attached.server import ServerChunk
from rollmesh.shared.domain.outputs import NO_LOGPROB, NO_TOKEN
from rollmesh.shared.domain.trajectory import Columns, FloatArray, IntArray
from rollmesh.shared.errors import ConfigError, Internal

_COMPARED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip


_DTYPES = {"half": "float16", "float": "float32"}
"""Further names of element types that servers accept."""


def computed_in(stated: str, model: Mapping[str, Any]) -> str:
    """Return the element type in which a server computes that states `stated`, empty if it is unknown.

    `auto` is that of the `config.json` of a model in 16 bits. For another model it depends on the server and its
    version.
    """
    if stated == "auto":
        stated = str(model.get("dtype") or model.get("torch_dtype") or "")
        return stated if stated in ("bfloat16", "float16") else ""
    stated = stated.removeprefix("torch.")
    return _DTYPES.get(stated, stated)


def floats(values: Sequence[float | None], num: int, what: str) -> FloatArray:
    """Return `num` finite values as float32. Raises Internal if the server sent others."""
    if len(values) != num:
        raise Internal(f"the server sent {len(values)} {what} for {num} tokens")
    array = np.array([np.nan if value is None else value for value in values], np.float32)
    if not np.isfinite(array).all():
        raise Internal(f"the server sent {what} that are not finite")
    return array


def top_table(rows: Sequence[Sequence[tuple[int, float]]], num_top: int) -> Columns:
    """Return the arrays of `top_k` [n, num_top] from rows of (token id, log-prob) in any order."""
    ids = np.full((len(rows), num_top), NO_TOKEN, np.int32)
    logprobs = np.full((len(rows), num_top), NO_LOGPROB, np.float32)
    for index, row in enumerate(rows):
        best = sorted(row, key=lambda entry: -entry[1])[:num_top]
        ids[index, : len(best)] = [token for token, _ in best]
        logprobs[index, : len(best)] = [logprob for _, logprob in best]
    return {"top_k_ids": ids, "top_k_logprobs": logprobs}


def routed_rows(values: IntArray, num: int) -> Columns:
    """Return the array of `routed_experts` [num, layers * experts per token] from the server's numbers of these
    rows."""
    if num == 0 or values.size % num or not values.size:
        raise Internal(f"the server sent {values.size} numbers of routed experts for {num} tokens")
    return {"routed_experts": values.reshape(num, -1).astype(np.int32)}


def received() -> ServerChunk:
    """Return a chunk without tokens, which tells the engine that the server runs the part."""
    none = np.empty(0, np.float32)
    return ServerChunk(tokens=np.empty(0, np.int32), logprobs=none, logprobs_model=none)


def joined(chunks: Sequence[ServerChunk]) -> ServerChunk:
    """Return one chunk with the tokens of all; the end is that of the last one."""
    last = chunks[-1]
    models = [chunk.logprobs_model for chunk in chunks if chunk.logprobs_model is not None]
    return ServerChunk(
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        logprobs_model=np.concatenate(models) if len(models) == len(chunks) else None,
        arrays={name: np.concatenate([chunk.arrays[name] for chunk in chunks]) for name in last.arrays},
        num_cached=last.num_cached,
        finish=last.finish,
        message=last.message,
        labels=last.labels,
    )


async def check_served_model(
    accepts_token: Callable[[int], Awaitable[bool]],
    *,
    url: str,
    model: Mapping[str, Any],
    vocab_size: int,
    served: Mapping[str, Any],
    path: str,
) -> None:
    """Raise ConfigError if the server runs another model than `model`, the fields of the model folder's configuration.

    `served` are the fields that the server tells, `path` is its model folder. If that folder is readable here, its
    configuration is compared too. The vocabulary is always compared, by two requests.
    """
    remedy = "start the server with the model of the run, or correct `model` or `url`"
    for source, fields in (("it reports", served), (f"{path}/config.json has", _config_at(path))):
        for key in (*_COMPARED, "architectures"):
            if fields.get(key) is not None and model.get(key) is not None and fields[key] != model[key]:
                raise ConfigError(
                    f"the server at {url} runs another model: {source} {key} {fields[key]!r}, the model folder has "
                    f"{model[key]!r}; {remedy}"
                )
    if not await accepts_token(vocab_size - 1) or await accepts_token(vocab_size):
        raise ConfigError(
            f"the server at {url} has another vocabulary than the {vocab_size} tokens of the model folder; {remedy}"
        )


def _config_at(path: str) -> Mapping[str, Any]:
    try:
        fields = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}  # on another machine, or a name of a hub
    return fields if isinstance(fields, dict) else {}
