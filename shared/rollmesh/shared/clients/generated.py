"""Requests and results of the inference router: targets, whole generations as segments by version, and scored
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import Columns, FinishReason, FloatArray, IntArray, Segment, oldest_kv_step
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.v1 import inference_pb2


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The admissible weights: `step` or newer of `incarnation` or newer; exactly those if `exact`.

    A generation to a `pinned` target finishes under the version that began it, also after a fail-over. Scoring ignores
    `pinned`.
    """

    policy: str = "main"
    endpoint: str = ""
    """An endpoint with frozen weights instead of a policy. Its only version has this name as policy."""
    step: int = 0
    incarnation: int = 0
    exact: bool = False
    pinned: bool = False

    def encode(self) -> inference_pb2.Target:
        kind = inference_pb2.Target
        selector = kind.SELECTOR_RESPONSE_PINNED if self.pinned else kind.SELECTOR_AT_LEAST
        if self.exact:
            selector = kind.SELECTOR_EXACT
        model = {"endpoint": self.endpoint} if self.endpoint else {"policy": self.policy}
        return kind(**model, selector=selector, step=self.step, incarnation=self.incarnation)

    def admits(self, version: PolicyVersion) -> bool:
        """Return whether these weights may serve the request."""
        if version.policy != (self.endpoint or self.policy):
            return False
        if self.exact:
            return (version.step, version.incarnation) == (self.step, self.incarnation)
        return version.step >= self.step and version.incarnation >= self.incarnation

    def of(self, version: PolicyVersion) -> Target:
        """Return the target that admits exactly this version."""
        return replace(self, step=version.step, incarnation=version.incarnation, exact=True)

    def __str__(self) -> str:
        if self.endpoint:
            return f"endpoint {self.endpoint}"
        incarnation = f" of incarnation {self.incarnation}" if self.incarnation else ""
        return f"{self.policy} at step {self.step}{incarnation}{'' if self.exact else ' or later'}"


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """One finished generation: one action segment per sampling version, in order, each with tokens.

    The segments are not part of an episode yet: `parent` is ROOT, and `sampling`, `loss_mask` and `messages` are unset.
    """

    segments: tuple[Segment, ...]
    finish: FinishReason
    num_failovers: int = 0
    """Number of fail-overs to another node."""
    num_prompt_cached: int = 0
    """Prefix tokens found in caches, summed over its nodes."""
    num_prompt_prefilled: int = 0
    """Prefix tokens computed for it, including received tokens that were resent."""

    @property
    def token_ids(self) -> IntArray:
        """All new tokens, [n]."""
        return np.concatenate([np.empty(0, np.int32), *(s.token_ids for s in self.segments)]).astype(np.int32)


class ScoredTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Given tokens under the plain softmax of one version of the weights.

    Row i of each array belongs to token i given the tokens before it. The first token of a whole sequence has no such
    distribution: its log-prob is 0, its values are 0, and its ids are -1.
    """

    logprobs: FloatArray
    """[n] float32, natural log."""
    version: PolicyVersion
    arrays: Columns = msgspec.field(default_factory=dict)
    """Arrays of the requested outputs by name, [n] or [n, k]."""

    def after(self, num_tokens: int) -> ScoredTokens:
        """Return the same without the first `num_tokens` tokens."""
        arrays = {name: values[num_tokens:] for name, values in self.arrays.items()}
        return replace(self, logprobs=self.logprobs[num_tokens:], arrays=arrays)


def merged(pieces: Sequence[Segment], finish: FinishReason) -> tuple[Segment, ...]:
    """Join adjacent pieces of one version to one segment each; the last one gets `finish`. Pieces without tokens are
    dropped.

    `kv_step_oldest` of a segment is the oldest of its pieces: under kv policy `keep`, a node after a fail-over has a
    fresher cache.
    """
    runs: list[list[Segment]] = []
    for piece in pieces:
        if not piece.token_ids.size:
            continue
        if runs and runs[-1][0].version == piece.version:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    last = len(runs) - 1
    return tuple(_joined(run, finish if i == last else FinishReason.UNFINISHED) for i, run in enumerate(runs))


def _joined(run: list[Segment], finish: FinishReason) -> Segment:
    if len(run) == 1:
        return run[0] if run[0].finish is finish else replace(run[0], finish=finish)

    def column(name: str) -> Any:
        parts = [getattr(piece, name) for piece in run]
        return None if any(part is None for part in parts) else np.concatenate(parts)

    steps = [piece.kv_step_oldest for piece in run if piece.kv_step_oldest is not None]
    return replace(
        run[0],
        **{name: column(name) for name in ("token_ids", "logprobs", "logprobs_model")},
        arrays={name: np.concatenate([piece.arrays[name] for piece in run]) for name in run[0].arrays},
        kv_step_oldest=oldest_kv_step(steps, run[0].version) if steps and run[0].version else None,
        finish=finish,
    )
