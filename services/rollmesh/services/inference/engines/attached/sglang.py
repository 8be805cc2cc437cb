"""Attach to a running SGLang server over its native HTTP API.

Written from the source of sglang 0.5.23 (`srt/managers/io_struct.py`, `srt/entrypoints/http_server.py`,
`srt/layers/sampler.py`), and tested against `rollmesh.testing.fake_sglang_server`, which has the same types. It has
never run against a real server.

What that source says, and this code relies on:

- `/abort_request` ends every request whose id begins with the given one, so all ids have one length.
- `ignore_eos` also disables `stop_token_ids`. Without it, the model's own end tokens stop a request too; the engine
  then sends the rest.
- `output_token_logprobs` are those of softmax(logits / temperature), without truncation. With top-k or top-p, the
  log-probs under the sampling distribution come with `return_sampling_mask`, which needs a `top_k`. The difference of
  both is log(kept mass).
- `weight_versions` covers all tokens of a request and is in its last message only.
- `/update_weights_from_disk` during a pause of mode `retract` drops all keys and values. It reports success only after
  that.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

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
from rollmesh.shared.domain.trajectory import Columns, IntArray, SamplingParams
from rollmesh.shared.errors import ConfigError, Internal, InvalidInput
from rollmesh.shared.net.http_link import HttpLink, decoded

VERSION = "0.5.23"
"""The release of SGLang whose source this was written from."""

_SEED_SIGN = 1 << 63
Entry = tuple[float | None, int, str | None]
"""Log-prob, token id, text."""


class SglangConfig(AttachedConfig):
    """A running SGLang server. It needs `--incremental-streaming-output`."""

    routed_experts: bool = False
    """The server runs a mixture-of-experts model with `--enable-return-routed-experts`, so the output `routed_experts`
    is offered."""


# Messages of the server: names of io_struct.py and http_server.py -----------------------------------------------------


class FinishInfo(msgspec.Struct):
    type: str
    message: str = ""


class VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct):
    """The fields of `meta_info` that are used."""

    finish_reason: FinishInfo | None = None
    cached_tokens: int | None = None
    output_token_logprobs: list[Entry] = []
    output_top_logprobs: list[list[Entry] | None] = []
    input_token_logprobs: list[Entry] = []
    input_top_logprobs: list[list[Entry] | None] = []
    output_token_sampling_mask: list[list[int]] = []
    output_token_sampling_logprobs: list[list[float]] = []
    routed_experts: str | None = None
    weight_versions: list[VersionSpan] = []


class GenerateOutput(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    error: dict[str, Any] | None = None


class ModelInfo(msgspec.Struct):
    weight_version: str
    model_path: str = ""
    model_type: str | None = None
    architectures: list[str] | None = None


class ServerInfo(msgspec.Struct):
    version: str
    max_req_input_len: int
    max_total_num_tokens: int
    incremental_streaming_output: bool = False
    enable_return_routed_experts: bool = False
    sampling_mask_max_tokens: int = 0
    dtype: str = "auto"


class LoadOfRank(msgspec.Struct):
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0


class Loads(msgspec.Struct):
    loads: list[LoadOfRank]


class WeightUpdateReply(msgspec.Struct):
    success: bool
    message: str


class SglangServer:
    """Implements `AttachedServer`."""

    def __init__(self, config: SglangConfig) -> None:
        self._config = config
        self._http = HttpLink(
            config.url, api_key_file=config.api_key_file, connections_max=config.slots_max + 16, call_s=config.call_s
        )
        self._mask_max = self._vocab_size = 0
        experts = ("routed_experts",) if config.routed_experts else ()
        self.capabilities = EngineCapabilities(outputs=("top_k", "kept_mass", *experts), score_outputs=("top_k",))

    async def open(self) -> None:
        await self._http.open()

    async def close(self) -> None:
        await self._http.close()

    async def status(self) -> ServerStatus:
        info = await self._http.get("/model_info", ModelInfo)
        loads = (await self._http.get("/v1/loads", Loads, params={"include": "core"})).loads
        return ServerStatus(
            label=info.weight_version,
            kv_tokens_used=sum(load.num_used_tokens for load in loads),
            kv_tokens_max=sum(load.max_total_num_tokens for load in loads),
        )

    async def check(self, model: Mapping[str, Any], vocab_size: int) -> None:
        info = await self._http.get("/model_info", ModelInfo)
        server = await self._http.get("/server_info", ServerInfo)
        config = self._config
        if not server.incremental_streaming_output:
            raise ConfigError(
                f"the server at {config.url} sends all tokens in each message; start it with "
                "--incremental-streaming-output"
            )
        if config.routed_experts and not server.enable_return_routed_experts:
            raise ConfigError(
                f"`routed_experts` is set, but the server at {config.url} lacks --enable-return-routed-experts; start "
                "it with the flag"
            )
        if config.context_max >= server.max_req_input_len:
            raise ConfigError(
                f"`context_max` must be < {server.max_req_input_len} for the server at {config.url}, got "
                f"{config.context_max}; lower it, or start the server with a larger --context-length or more memory",
                key="context_max",
            )
        self._mask_max, self._vocab_size = server.sampling_mask_max_tokens, vocab_size
        self.capabilities = dataclasses.replace(self.capabilities, dtype=computed_in(server.dtype, model))
        await self._http.notify("/continue_generation", {})  # a node that crashed during an update leaves it paused
        await check_served_model(
            self._accepts_token,
            url=config.url,
            model=model,
            vocab_size=vocab_size,
            served={"model_type": info.model_type, "architectures": info.architectures},
            path=info.model_path,
        )

    async def _accepts_token(self, token: int) -> bool:
        """Return whether the vocabulary has a token: the server checks the keys of `logit_bias`."""
        params = {"max_new_tokens": 1, "temperature": 0.0, "logit_bias": {str(token): 0.0}}
        try:
            await self._http.post("/generate", {"input_ids": [0], "sampling_params": params}, GenerateOutput)
        except InvalidInput:
            return False
        return True

    def check_request(self, request: GenerateRequest) -> None:
        params, where = request.params, f"request {request.request_id!r}"
        if _is_truncated(params) and (params.top_k or self._vocab_size) > self._mask_max:
            raise ValueError(
                f"{where}: with top_p < 1 or top_k, `top_k` must be in [1, {self._mask_max}] on SGLang, got "
                f"{params.top_k}: beyond it, the server does not return log-probs of the truncated distribution; set "
                "it, or raise --sampling-mask-max-tokens"
            )
        if "kept_mass" in request.outputs and params.top_k == 1 and params.temperature not in (0.0, 1.0):
            raise ValueError(f"{where}: kept_mass with top_k 1 needs temperature 1 on SGLang, got {params.temperature}")

    async def stream(self, part: ServerPart) -> AsyncGenerator[ServerChunk, None]:
        held: list[ServerChunk] = []  # with routed experts, which are in the last message only
        async with self._http.stream("/generate", self._body(part), idle_s=self._config.idle_s) as lines:
            async for line in lines:
                output = decoded(line, GenerateOutput, "POST /generate")
                chunk = _chunk(part, output)
                if "routed_experts" not in part.outputs:
                    yield chunk
                    continue
                held.append(chunk)
                if not chunk.finish:
                    yield received()
                    continue
                whole = joined(held)
                if len(whole.tokens):
                    arrays = {**whole.arrays, **_experts(output, len(whole.tokens))}
                    whole = dataclasses.replace(whole, arrays=arrays)
                yield whole

    async def abort(self, part_ids: Sequence[str]) -> None:
        await asyncio.gather(*(self._http.notify("/abort_request", {"rid": part_id}) for part_id in part_ids))

    async def update(self, folder: str, label: str) -> None:
        body = {"model_path": folder, "load_format": "auto", "weight_version": label, "flush_cache": True}
        await self._http.notify("/pause_generation", {"mode": "retract"})
        try:
            result = await self._http.post(
                "/update_weights_from_disk", body, WeightUpdateReply, limit_s=self._config.update_s
            )
        except InvalidInput as err:  # the server reports a failed update as HTTP 400
            raise Internal(f"{err} (the server must be able to read `weights_dir`)") from err
        finally:
            await self._http.notify("/continue_generation", {})
        if not result.success:
            raise Internal(f"the server did not load {folder}: {result.message}")

    async def score(self, token_ids: IntArray, *, num_top: int) -> ServerScore:
        body = {
            "rid": uuid.uuid4().hex,
            "input_ids": token_ids.tolist(),
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": num_top,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        output = await self._http.post("/generate", body, GenerateOutput, limit_s=self._config.score_s)
        meta = output.meta_info or MetaInfo()
        rest = floats(
            [entry[0] for entry in meta.input_token_logprobs[1:]], len(token_ids) - 1, "log-probs of the prompt"
        )
        arrays: Columns = {}
        if num_top:
            arrays = top_table(_rows([None, *meta.input_top_logprobs[1:]], len(token_ids)), num_top)
            arrays["top_k_logprobs"][0] = 0.0
        return ServerScore(
            logprobs=np.concatenate((np.zeros(1, np.float32), rest)),
            arrays=arrays,
            labels=tuple(span.version for span in meta.weight_versions),
        )

    def _body(self, part: ServerPart) -> dict[str, Any]:
        params = part.params
        greedy, truncated = params.temperature == 0.0, _is_truncated(params)
        body: dict[str, Any] = {
            "rid": part.part_id,
            "input_ids": part.token_ids.tolist(),
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": part.num_top if "top_k" in part.outputs and not truncated else 0,
            "cache_salt": part.label,
            "sampling_params": {
                "max_new_tokens": part.max_tokens,
                "temperature": params.temperature,
                "top_p": 1.0 if greedy else params.top_p,
                "top_k": (params.top_k or self._vocab_size) if truncated else -1,
                "sampling_seed": (params.seed + _SEED_SIGN) % (2 * _SEED_SIGN) - _SEED_SIGN,
                "ignore_eos": not params.stop_token_ids,
                "stop_token_ids": list(params.stop_token_ids),
                "stream_interval": self._config.flush_tokens,
            },
        }
        if truncated:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
        if "routed_experts" in part.outputs:
            body |= {"return_routed_experts": True, "routed_experts_start_len": len(part.token_ids) - 1}
        return body


def _is_truncated(params: SamplingParams) -> bool:
    return params.temperature > 0.0 and (params.top_p < 1.0 or params.top_k > 0)


def _chunk(part: ServerPart, output: GenerateOutput) -> ServerChunk:
    meta = output.meta_info
    if output.error is not None or meta is None:
        raise Internal(f"the server ended the request: {output.error or 'a message without meta_info'}")
    num, params = len(output.output_ids), part.params
    tempered = floats([entry[0] for entry in meta.output_token_logprobs], num, "log-probs")
    logprobs = tempered
    arrays: dict[str, NDArray[Any]] = {}
    if _is_truncated(params):
        support = _support(meta, num)
        chosen = [dict(row).get(token) for token, row in zip(output.output_ids, support, strict=True)]
        logprobs = floats(chosen, num, "log-probs in the sampling mask")
        if "top_k" in part.outputs:
            arrays |= top_table(support, part.num_top)
    elif "top_k" in part.outputs:
        arrays |= top_table(_rows(meta.output_top_logprobs, num), part.num_top)
    if "kept_mass" in part.outputs:
        arrays["kept_mass"] = np.minimum(np.exp(tempered - logprobs), np.float32(1.0))
    return ServerChunk(
        tokens=np.array(output.output_ids, np.int32),
        logprobs=logprobs,
        logprobs_model=tempered if params.temperature in (0.0, 1.0) else None,
        arrays=arrays,
        num_cached=meta.cached_tokens,
        finish=meta.finish_reason.type if meta.finish_reason else "",
        message=meta.finish_reason.message if meta.finish_reason else "",
        labels=tuple(span.version for span in meta.weight_versions),
    )


def _support(meta: MetaInfo, num: int) -> list[list[tuple[int, float]]]:
    """Return the kept tokens of each position with their log-probs under the sampling distribution."""
    masks, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if not len(masks) == len(logprobs) == num:
        raise Internal(f"the server sent {len(masks)} sampling masks for {num} tokens")
    return [list(zip(mask, row, strict=True)) for mask, row in zip(masks, logprobs, strict=True)]


def _rows(entries: Sequence[list[Entry] | None], num: int) -> list[list[tuple[int, float]]]:
    if len(entries) != num:
        raise Internal(f"the server sent {len(entries)} rows of top log-probs for {num} tokens")
    return [[(token, logprob) for logprob, token, _ in row or () if logprob is not None] for row in entries]


def _experts(output: GenerateOutput, num: int) -> Columns:
    encoded = output.meta_info.routed_experts if output.meta_info else None
    return routed_rows(np.frombuffer(base64.b64decode(encoded or ""), "<i4"), num)


class SglangEngine(AttachedEngine):
    """Implements `rollmesh.services.inference.engine.Engine`."""

    Options: ClassVar[type[Settings]] = SglangConfig

    def __init__(self, options: SglangConfig, clock: Clock | None = None) -> None:
        super().__init__(options, SglangServer(options), clock)
