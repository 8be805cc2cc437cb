"""An inference engine: draw every token uniformly, under any weights."""

import asyncio
import math

import msgspec
import numpy as np

from rollmesh.services.inference.engine import Engine, EngineLoad, GenerateDelta, ScoreResult
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.trajectory import FinishReason


class UniformOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    vocab_size: int = 64
    context_max: int = 1024


class UniformEngine(Engine):
    Options = UniformOptions
    capabilities = EngineCapabilities()  # e.g. outputs=("entropy",): further per-token outputs that a request may name

    def __init__(self, *, options):
        self.options, self.context_max = options, options.context_max
        self.active, self.prepared, self.waiting, self.sampled = None, set(), {}, 0

    async def start(self):
        pass

    async def close(self):
        for request_id in list(self.waiting):
            self.cancel(request_id)

    def submit(self, request, emit):
        room = self.context_max - len(request.token_ids)
        if request.request_id in self.waiting or not 0 <= room < self.context_max:
            raise ValueError(f"request {request.request_id}: unknown prefix or duplicate id")
        num = min(request.params.max_tokens, room)
        tokens = np.random.default_rng(request.params.seed).integers(self.options.vocab_size, size=num, dtype=np.int32)
        later = asyncio.get_running_loop().call_soon(self._finish, request.request_id, tokens, FinishReason.LENGTH)
        self.waiting[request.request_id] = emit, later

    def cancel(self, request_id):
        if request_id in self.waiting:
            self.waiting[request_id][1].cancel()
            self._finish(request_id, np.zeros(0, np.int32), FinishReason.CANCELLED)

    def _finish(self, request_id, tokens, finish):
        emit, _ = self.waiting.pop(request_id)
        self.sampled += len(tokens)
        logprobs = self._logprobs(len(tokens))
        emit(
            GenerateDelta(
                request_id=request_id,
                token_ids=tokens,
                logprobs=logprobs,
                logprobs_model=logprobs,
                version=self.active,
                kv_step_oldest=self.active.step,
                finish=finish,
            )
        )

    def _logprobs(self, num):
        return np.full(num, -math.log(self.options.vocab_size), np.float32)

    @property
    def held(self):
        return (self.active,) if self.active else ()

    async def score(self, sequences, *, version=None, outputs=(), num_top=8):
        found = [self._logprobs(len(tokens)) for tokens in sequences]
        for logprobs in found:
            logprobs[0] = 0.0
        return [ScoreResult(logprobs=logprobs, version=self.active) for logprobs in found]

    async def prepare(self, version, tensors):  # tensors: file name -> path of safetensors
        self.prepared.add(version)

    async def activate(self, version, kv, retain=()):
        if version != self.active and version not in self.prepared:
            raise KeyError(version)
        self.active = version

    def discard(self, version):
        self.prepared.discard(version)

    def load(self):
        return EngineLoad(
            num_running=len(self.waiting),
            num_waiting=0,
            slots_max=1024,
            kv_tokens_used=0,
            kv_tokens_max=0,
            tokens_generated=self.sampled,
            tokens_prefilled=0,
            tokens_prefix_hit=0,
            steps=0,
        )
