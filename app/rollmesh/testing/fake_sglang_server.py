"""A small server with the HTTP types of SGLang, for tests of the engine `sglang`. It is part of rollmesh, not of
SGLang.

Names and semantics are those of the source of sglang 0.5.23 (`srt/managers/io_struct.py`,
`srt/entrypoints/http_server.py`); a field that is not in the lists below is rejected with HTTP 400. The model is a
bigram table: the logits of the next token are a row of the tensor `bigram` [vocabulary, vocabulary], which is read from
the safetensors files of a model folder. So tokens depend on the prefix and on the files of the weights, and every
log-prob can be computed exactly.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.testing.fake_policy import Floats, log_softmax, truncate, uniforms

VERSION = "0.5.23"
GENERATE_FIELDS = frozenset(
    [
        "rid",
        "input_ids",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "return_sampling_mask",
        "sampling_logprobs_mode",
        "return_routed_experts",
        "routed_experts_start_len",
        "stream",
        "cache_salt",
    ]
)
"""Names in `GenerateReqInput` that this server implements."""
SAMPLING_FIELDS = frozenset(
    [
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop_token_ids",
        "ignore_eos",
        "sampling_seed",
        "stream_interval",
        "logit_bias",
    ]
)
"""Names in `SamplingParams`."""
BODY_FIELDS: Mapping[str, frozenset[str]] = {
    "AbortReq": frozenset({"rid", "abort_all"}),
    "PauseGenerationReqInput": frozenset({"mode"}),
    "ContinueGenerationReqInput": frozenset({"torch_empty_cache"}),
    "UpdateWeightFromDiskReqInput": frozenset(
        {"model_path", "load_format", "weight_version", "flush_cache", "abort_all_requests", "keep_pause"}
    ),
}
"""Names in the other request types."""
_TOP_K_ALL = 1 << 30
_LAYERS, _EXPERTS = 2, 3
"""Shape of the routed experts that the server reports."""


@dataclass(slots=True)
class _ServedRequest:
    rid: str
    prompt: list[int]
    params: dict[str, Any]
    sampling: SamplingParams
    fields: dict[str, Any]
    new: list[int] = field(default_factory=list)
    num_cached: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    """Weights that ended, with the number of tokens at that time."""
    aborted: bool = False


class FakeSglangServer:
    """Serves on a loopback port. Flags are those of the server's command line."""

    def __init__(
        self,
        model: Path,
        *,
        api_key: str = "",
        step_s: float = 0.001,
        eos_token_id: int | None = None,
        incremental_streaming_output: bool = True,
        enable_return_routed_experts: bool = True,
        sampling_mask_max_tokens: int = 4096,
        context_length: int = 4096,
        dtype: str = "auto",
    ) -> None:
        """`step_s` is the duration of a step, which samples a token per request."""
        self._config = json.loads((model / "config.json").read_text())
        self._vocab = int(self._config["vocab_size"])
        self._model_path = str(model)
        self._table: Floats = np.zeros((self._vocab, self._vocab))
        self._api_key = api_key
        self._step_s = step_s
        self._eos = eos_token_id
        self._flags = {
            "dtype": dtype,
            "incremental_streaming_output": incremental_streaming_output,
            "enable_return_routed_experts": enable_return_routed_experts,
            "sampling_mask_max_tokens": sampling_mask_max_tokens,
        }
        self._max_req_input_len = context_length - 6
        self._weight_version = "default"
        self._running: dict[str, _ServedRequest] = {}
        self._cache: list[tuple[str, list[int]]] = []
        self._paused = False
        self._changed = asyncio.Event()
        self.num_aborted = 0
        """Requests that ended by an abort."""
        self.num_served = 0
        """Requests to /generate."""
        self.fail_update = ""
        """Message with which the next updates fail, for tests."""
        self.stuck = False
        """Report success of an update and keep the old weights, for tests."""
        self.hang = False
        """Accept requests and never respond, for tests."""
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/model_info", self._get_model_info),
                web.get("/server_info", self._get_server_info),
                web.get("/v1/loads", self._get_loads),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
                web.post("/pause_generation", self._pause_generation),
                web.post("/continue_generation", self._continue_generation),
                web.post("/update_weights_from_disk", self._update_weights_from_disk),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def running(self) -> tuple[str, ...]:
        """Return the ids of the requests that hold memory."""
        return tuple(self._running)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.hang:
            await asyncio.Event().wait()
        try:
            return await handler(request)
        except _BadRequest as err:
            return web.json_response({"error": {"message": str(err)}}, status=400)

    # Control ----------------------------------------------------------------------------------------------------------

    async def _get_model_info(self, request: web.Request) -> web.Response:
        names = ("model_type", "architectures")
        fields = {name: self._config.get(name) for name in names}
        return web.json_response({"model_path": self._model_path, "weight_version": self._weight_version, **fields})

    async def _get_server_info(self, request: web.Request) -> web.Response:
        sizes = {"max_req_input_len": self._max_req_input_len, "max_total_num_tokens": 1 << 20}
        return web.json_response({"version": VERSION, **sizes, **self._flags})

    async def _get_loads(self, request: web.Request) -> web.Response:
        used = sum(len(one.prompt) + len(one.new) for one in self._running.values())
        return web.json_response({"loads": [{"num_used_tokens": used, "max_total_num_tokens": 1 << 20}]})

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await _body(request, BODY_FIELDS["AbortReq"])
        rid = str(body.get("rid") or "")
        if rid in self._running or body.get("abort_all"):
            for one in self._running.values():
                one.aborted = one.aborted or one.rid.startswith(rid)
            self._notify()
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        body = await _body(request, BODY_FIELDS["PauseGenerationReqInput"])
        if body.get("mode") not in ("abort", "retract", "in_place"):
            raise _BadRequest(f"mode: {body.get('mode')!r}")
        self._paused = True
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        await _body(request, BODY_FIELDS["ContinueGenerationReqInput"])
        self._paused = False
        self._notify()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await _body(request, BODY_FIELDS["UpdateWeightFromDiskReqInput"])
        if self.fail_update:
            return web.json_response({"success": False, "message": self.fail_update}, status=400)
        table = _read_table(Path(body["model_path"]), self._vocab)
        self._table = self._table if self.stuck else table
        self.set_version(str(body["weight_version"]))
        self._model_path = body["model_path"]
        if body.get("flush_cache", True):
            self._cache.clear()
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    def _notify(self) -> None:
        """Wake the requests that wait for the end of a pause, or for an abort."""
        self._changed.set()
        self._changed = asyncio.Event()

    def set_version(self, name: str) -> None:
        """Rename the weights, as another client of the server can."""
        for one in self._running.values():
            if one.new:
                one.events.append((self._weight_version, len(one.new)))
        self._weight_version = name

    # Generation -------------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        one = self._request(await _body(request, GENERATE_FIELDS))
        self.num_served += 1
        self._running[one.rid] = one
        try:
            one.num_cached = self._num_cached(one)
            if not one.fields.get("stream"):
                return await self._whole(one)
            return await self._stream(one, request)
        finally:
            del self._running[one.rid]

    def _request(self, body: dict[str, Any]) -> _ServedRequest:
        params = body["sampling_params"]
        _check_names(params, SAMPLING_FIELDS)
        prompt = body["input_ids"]
        if not prompt or len(prompt) >= self._max_req_input_len:
            raise _BadRequest(f"The input ({len(prompt)} tokens) is longer than the model's context length")
        for token in (params.get("logit_bias") or {}, prompt):
            if any(not 0 <= int(one) < self._vocab for one in token):
                raise _BadRequest(f"logit_bias must has keys in [0, {self._vocab - 1}]")
        top_k, temperature = params.get("top_k", _TOP_K_ALL), params.get("temperature", 1.0)
        if temperature < 1e-6:
            temperature, top_k = 1.0, 1
        if top_k == -1:
            top_k = _TOP_K_ALL
        if body.get("return_sampling_mask") and not 1 <= top_k <= self._flags["sampling_mask_max_tokens"]:
            raise _BadRequest(f"return_sampling_mask requires a finite top_k; got top_k={top_k}")
        if not -(2**63) <= params.get("sampling_seed", 0) < 2**63:
            raise _BadRequest("sampling_seed must be in [-2**63, 2**63 - 1]")
        sampling = SamplingParams(
            temperature=temperature,
            top_p=params.get("top_p", 1.0),
            top_k=0 if top_k >= self._vocab else top_k,
            max_tokens=params.get("max_new_tokens", 128),
            seed=params.get("sampling_seed", 0),
        )
        return _ServedRequest(str(body.get("rid") or f"fake-{self.num_served}"), list(prompt), params, sampling, body)

    async def _whole(self, one: _ServedRequest) -> web.Response:
        start = 0
        reason = None if one.sampling.max_tokens else {"type": "length", "length": 0}
        while reason is None:
            reason = await self._step(one)
        return web.json_response(self._output(one, start, reason))

    async def _stream(self, one: _ServedRequest, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        interval, start, reason = one.params.get("stream_interval") or 1, 0, None
        while reason is None:
            reason = await self._step(one)
            if reason or len(one.new) - start >= interval or (start == 0 and one.new):
                await response.write(b"data: " + json.dumps(self._output(one, start, reason)).encode() + b"\n\n")
                start = len(one.new)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _step(self, one: _ServedRequest) -> dict[str, Any] | None:
        """Sample one token, or end an aborted request. Return the reason of the end."""
        if not one.aborted:
            await asyncio.sleep(self._step_s)
            while self._paused and not one.aborted:
                await self._changed.wait()
        if one.aborted:
            self.num_aborted += 1
            return {"type": "abort", "message": "Aborted"}
        position = len(one.prompt) + len(one.new)
        logprobs = self._behavior(one, (one.prompt + one.new)[-1])
        cumulative = np.exp(logprobs).cumsum()
        mark = uniforms(one.sampling.seed, np.array([position]))[0] * cumulative[-1]
        token = int((cumulative <= mark).sum())
        one.new.append(token)
        if not one.params.get("ignore_eos") and token in (*(one.params.get("stop_token_ids") or ()), self._eos):
            return {"type": "stop", "matched": token}
        if len(one.new) >= one.sampling.max_tokens:
            return {"type": "length", "length": len(one.new)}
        return None

    def _tempered(self, one: _ServedRequest, previous: int) -> Floats:
        return log_softmax(self._table[previous] / one.sampling.temperature)

    def _behavior(self, one: _ServedRequest, previous: int) -> Floats:
        kept: Floats = truncate(self._table[previous][None] / one.sampling.temperature, one.sampling)[0]
        return kept

    def _num_cached(self, one: _ServedRequest) -> int:
        salt = one.fields.get("cache_salt") or ""
        if one.fields.get("logprob_start_len", -1) >= 0:
            return 0
        known = [tokens for other, tokens in self._cache if other == salt]
        return max((_common(tokens, one.prompt[:-1]) for tokens in known), default=0)

    def _output(self, one: _ServedRequest, start: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        """Return the message about the tokens from `start` on."""
        tokens = one.prompt + one.new
        rows = range(len(one.prompt) + start, len(tokens))
        meta: dict[str, Any] = {
            "id": one.rid,
            "finish_reason": reason,
            "prompt_tokens": len(one.prompt),
            "completion_tokens": len(one.new),
            "cached_tokens": one.num_cached,
            "weight_version": self._weight_version,
        }
        if one.fields.get("return_logprob"):
            num_top = one.fields.get("top_logprobs_num") or 0
            tempered = [self._tempered(one, tokens[row - 1]) for row in rows]
            meta["output_token_logprobs"] = [
                [float(t[tokens[r]]), tokens[r], None] for t, r in zip(tempered, rows, strict=True)
            ]
            if num_top:
                meta["output_top_logprobs"] = [_top(values, num_top) for values in tempered]
            if one.fields.get("logprob_start_len", -1) == 0 and reason:
                plain = [log_softmax(self._table[previous]) for previous in one.prompt[:-1]]
                scored = [[float(p[token]), token, None] for p, token in zip(plain, one.prompt[1:], strict=True)]
                meta["input_token_logprobs"] = [[None, one.prompt[0], None], *scored]
                meta["input_top_logprobs"] = [None, *(_top(values, num_top) for values in plain)] if num_top else []
        if one.fields.get("return_sampling_mask"):
            kept = [self._behavior(one, tokens[row - 1]) for row in rows]
            masks = [np.flatnonzero(np.isfinite(values)).tolist() for values in kept]
            meta["output_token_sampling_mask"] = masks
            support = one.fields.get("sampling_logprobs_mode") == "support"
            chosen = [values[mask].tolist() for values, mask in zip(kept, masks, strict=True)]
            selected = [float(values[tokens[row]]) for values, row in zip(kept, rows, strict=True)]
            meta["output_token_sampling_logprobs"] = chosen if support else selected
        if reason:
            meta["weight_versions"] = self._spans(one)
            meta["weight_version"] = meta["weight_versions"][-1]["version"]
            if one.fields.get("return_routed_experts"):
                meta["routed_experts"] = self._experts(tokens[one.fields.get("routed_experts_start_len", 0) : -1])
            self._cache.append((one.fields.get("cache_salt") or "", tokens[:-1] if one.new else tokens))
        return {"text": "", "output_ids": one.new[start:], "meta_info": meta}

    def _spans(self, one: _ServedRequest) -> list[dict[str, Any]]:
        changes = [*one.events, (self._weight_version, len(one.new))]
        starts = [0, *(end for _, end in changes[:-1])]
        return [
            {"version": name, "start": start, "end": end} for (name, end), start in zip(changes, starts, strict=True)
        ]

    def _experts(self, inputs: list[int]) -> str:
        """Return ids of experts that depend on the input token, as the base64 text of int32 [tokens, layers, experts
        per token]."""
        table = np.array(inputs, np.int32)[:, None, None] + np.arange(_LAYERS * _EXPERTS, dtype=np.int32).reshape(
            _LAYERS, -1
        )
        return base64.b64encode(np.ascontiguousarray(table % 8, "<i4").tobytes()).decode()


class _BadRequest(Exception):
    """Becomes HTTP 400."""


async def _body(request: web.Request, names: frozenset[str]) -> dict[str, Any]:
    body = await request.json()
    _check_names(body, names)
    assert isinstance(body, dict)
    return body


def _check_names(body: Mapping[str, Any], names: frozenset[str]) -> None:
    if unknown := set(body) - names:
        raise _BadRequest(f"unknown field `{min(unknown)}`, expected one of {sorted(names)}")


def _read_table(folder: Path, vocab: int) -> Floats:
    (path,) = folder.glob("*.safetensors")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + size])["bigram"]["data_offsets"]
    values: NDArray[np.float32] = np.frombuffer(data[8 + size + start : 8 + size + end], "<f4")
    return values.reshape(vocab, vocab).astype(np.float64)


def _top(values: Floats, num: int) -> list[list[Any]]:
    best = np.argsort(-values, kind="stable")[:num]
    return [[float(values[token]), int(token), None] for token in best]


def _common(first: list[int], second: list[int]) -> int:
    num = min(len(first), len(second))
    return next((index for index in range(num) if first[index] != second[index]), num)
