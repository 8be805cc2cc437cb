"""One live request of the vLLM engine: the tokens that vLLM has returned, the stop rules, and the deltas that leave.

The worker stamps each token with the serial number of its weights, so that a delta never spans versions, whatever
arrives first: the token or the end of the update. Collaborator: `engine`, which feeds outputs and calls `flush` and
`finish`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from rollmesh.services.inference.engine import NO_VERSION, Emit, GenerateDelta, GenerateRequest, KvPolicy
from rollmesh.services.inference.engines.common.stop import STOP_ID, StopRules
from rollmesh.services.inference.engines.vllm import columns
from rollmesh.shared.domain.trajectory import FinishReason
from rollmesh.shared.domain.versions import PolicyVersion

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}
OUTPUTS = (*columns.VALUES, "top_k")
"""Outputs of a generation."""


class WeightsStamp(NamedTuple):
    """The weights of a serial number, as one request meets them."""

    version: PolicyVersion
    kv_step_oldest: int


class LiveRequest:
    """A request from its submission to its last delta."""

    def __init__(self, request: GenerateRequest, emit: Emit, stop_rules: StopRules, flush_tokens: int) -> None:
        self.request = request
        self.submitted_s = self.queued_s = 0.0
        self.ended = False
        """Whether the last delta has left."""
        self.num_emitted = 0
        self.num_cached = 0
        self.num_restarts = 0
        """Updates at which the request has begun again."""
        self.must_abort = True
        self._emit = emit
        self._stop_rules = stop_rules
        self._flush_tokens = flush_tokens
        self._marks = stop_rules.marks(request.params)
        self._weights: dict[int, WeightsStamp] = {}
        self._tokens: list[int] = []
        """All tokens that count as new for stop strings: those of another node, then those received here."""
        if request.params.stop and request.num_resumed:
            self._tokens = request.token_ids[-request.num_resumed :].tolist()
        self._ids: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []
        self._num_buffered = 0

    @property
    def has_tokens(self) -> bool:
        """Whether vLLM has returned a token."""
        return self.num_emitted + self._num_buffered > 0

    @property
    def num_pairs(self) -> int:
        """Number of pairs beside the sampled token's that vLLM must return per token."""
        return num_pairs(self.request.outputs, self.request.num_top)

    def meets(self, serial: int, version: PolicyVersion, kv: KvPolicy) -> None:
        """Note that weights become active while the request runs (`kv` says what happens to its keys), or that it
        starts under them."""
        oldest = version.step
        if kv is KvPolicy.KEEP and self._weights:
            oldest = self._weights[max(self._weights)].kv_step_oldest
        self._weights[serial] = WeightsStamp(version, oldest)

    def take(self, output: Any) -> tuple[FinishReason | None, int]:
        """Add one `RequestOutput` of vLLM. Return the reason if the request ends with it, and the number of new tokens.

        The caller then calls `finish`. `must_abort` says whether vLLM would go on."""
        completion = output.outputs[0]
        self.num_cached = output.num_cached_tokens or 0
        tokens = list(completion.token_ids)
        finish = (
            None if completion.finish_reason is None else _FINISHES.get(completion.finish_reason, FinishReason.ERROR)
        )
        self.must_abort = finish is None
        if tokens:
            width = 1 + self.num_pairs
            ids = np.array(completion.logprobs.token_ids, np.int64).reshape(len(tokens), width)
            values = np.array(completion.logprobs.logprobs, np.float64).reshape(len(tokens), width)
            kept = self._num_until_stop(tokens)
            if kept:
                finish = FinishReason.STOP
                tokens, ids, values = tokens[:kept], ids[:kept], values[:kept]
            self._ids.append(ids)
            self._values.append(values)
            self._num_buffered += len(tokens)
        if finish is None and self._num_buffered >= (self._flush_tokens if self.num_emitted else 1):
            self.flush()
        return finish, len(tokens)

    def _num_until_stop(self, tokens: list[int]) -> int:
        """Append new tokens. Return the number of those up to the one that ends the request; 0 if none does."""
        stop = self.request.params.stop
        for number, token in enumerate(tokens, start=1):
            mark = int(self._marks[token])
            if stop:
                self._tokens.append(token)
            if mark & STOP_ID or (mark and self._stop_rules.ends_text(np.array(self._tokens, np.int32), stop)):
                return number
        return 0

    def flush(self) -> None:
        """Emit the buffered tokens."""
        for delta in self._deltas():
            self._emit(delta)

    def finish(self, reason: FinishReason, active: PolicyVersion | None, error: str = "") -> None:
        """Emit the buffered tokens and the end. `active` is the version of an end without tokens."""
        if self.ended:
            return
        self.ended = True
        *before, last = self._deltas() or [_empty(self.request.request_id, active or NO_VERSION)]
        for delta in before:
            self._emit(delta)
        self._emit(replace(last, finish=reason, error=error))

    def _deltas(self) -> list[GenerateDelta]:
        """Return the buffered tokens as one delta per version, and empty the buffer."""
        if not self._num_buffered:
            return []
        ids, values = np.concatenate(self._ids), np.concatenate(self._values)
        self._ids, self._values, self._num_buffered = [], [], 0
        serials = columns.serials_of(ids[:, columns.WEIGHTS])
        cuts = np.flatnonzero(np.diff(serials)) + 1
        bounds = [0, *cuts.tolist(), len(ids)]
        return [self._delta(ids[a:b], values[a:b], int(serials[a])) for a, b in itertools.pairwise(bounds)]

    def _delta(self, ids: NDArray[np.int64], values: NDArray[np.float64], serial: int) -> GenerateDelta:
        weights, first = self._weights[serial], self.num_emitted == 0
        self.num_emitted += len(ids)
        return GenerateDelta(
            request_id=self.request.request_id,
            token_ids=ids[:, 0].astype(np.int32),
            logprobs=values[:, 0].astype(np.float32),
            logprobs_model=values[:, columns.WEIGHTS].astype(np.float32),
            arrays=self._arrays(ids, values),
            version=weights.version,
            kv_step_oldest=weights.kv_step_oldest,
            num_prompt_cached=self.num_cached if first else 0,
            num_prompt_prefilled=len(self.request.token_ids) - self.num_cached if first else 0,
            queued_s=self.queued_s if first else 0.0,
        )

    def _arrays(self, ids: NDArray[np.int64], values: NDArray[np.float64]) -> Mapping[str, NDArray[Any]]:
        wanted = self.request.outputs
        arrays: dict[str, NDArray[Any]] = {
            name: values[:, column].astype(np.float32) for name, column in columns.VALUES.items() if name in wanted
        }
        if "top_k" in wanted:
            arrays["top_k_ids"] = columns.top_ids_of(ids[:, columns.TOP :])
            arrays["top_k_logprobs"] = values[:, columns.TOP :].astype(np.float32)
        return arrays


def num_pairs(outputs: tuple[str, ...], num_top: int) -> int:
    """Return the number of pairs beside the sampled token's that the outputs of a generation need."""
    if not outputs:
        return columns.WEIGHTS
    return columns.NUM_OUTPUTS + (num_top if "top_k" in outputs else 0)


def _empty(request_id: str, version: PolicyVersion) -> GenerateDelta:
    none = np.empty(0, np.float32)
    return GenerateDelta(
        request_id=request_id,
        token_ids=np.empty(0, np.int32),
        logprobs=none,
        logprobs_model=none,
        version=version,
        kv_step_oldest=version.step,
    )
