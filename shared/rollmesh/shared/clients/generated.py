"""What the inference router is asked for and gives back: targets, spans of tokens by version, whole answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollmesh.shared.trajectory import FinishReason, FloatArray, IntArray, Role, Segment, Source
from rollmesh.shared.versions import PolicyVersion
from rollmesh.v1 import inference_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which weights may answer: `step` or newer of `incarnation` or newer; exactly those if `exact`."""

    policy: str = "main"
    step: int = 0
    incarnation: int = 0
    exact: bool = False

    def encode(self) -> inference_pb2.Target:
        kind = inference_pb2.Target
        selector = kind.SELECTOR_EXACT if self.exact else kind.SELECTOR_AT_LEAST
        return kind(policy=self.policy, selector=selector, step=self.step, incarnation=self.incarnation)

    def admits(self, version: PolicyVersion) -> bool:
        """Whether these weights may answer."""
        if version.policy != self.policy:
            return False
        if self.exact:
            return (version.step, version.incarnation) == (self.step, self.incarnation)
        return version.step >= self.step and version.incarnation >= self.incarnation

    def __str__(self) -> str:
        which = "exactly" if self.exact else "at least"
        return f"{self.policy} at {which} step {self.step} of incarnation {self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Sampled tokens of one version, [n] each, as in `rollmesh.shared.trajectory.Segment`.

    `finish` is UNFINISHED unless this is the last span of an answer.
    """

    token_ids: IntArray
    logprobs: FloatArray
    logprobs_model: FloatArray | None
    version: PolicyVersion
    kv_step_oldest: int
    finish: FinishReason = FinishReason.UNFINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One continuation: a span per version that sampled a part of it, in order. No span holds no tokens."""

    spans: tuple[Span, ...]
    finish: FinishReason
    num_failovers: int = 0
    """Times it went on at another node."""
    num_prompt_cached: int = 0
    """Prefix tokens found in caches, over all nodes it ran on."""
    num_prompt_prefilled: int = 0
    """Prefix tokens computed for it, received tokens sent again included."""

    @property
    def token_ids(self) -> IntArray:
        """All new tokens, [n]."""
        return np.concatenate([np.empty(0, np.int32), *(span.token_ids for span in self.spans)]).astype(np.int32)

    def segments(self, *, parent: int, index: int, sampling: int, trainable: bool = True) -> tuple[Segment, ...]:
        """The answer as a chain of action segments: the first one's parent is `parent`, its own place in the episode `index`."""
        return tuple(
            Segment(
                parent=parent if i == 0 else index + i - 1,
                role=Role.ACTION,
                source=Source.POLICY,
                token_ids=span.token_ids,
                logprobs=span.logprobs,
                logprobs_model=span.logprobs_model,
                loss_mask=np.full(span.token_ids.shape, int(trainable), np.uint8),
                version=span.version,
                kv_step_oldest=span.kv_step_oldest,
                sampling=sampling,
                finish=span.finish,
            )
            for i, span in enumerate(self.spans)
        )


def merged(pieces: list[Span], finish: FinishReason) -> tuple[Span, ...]:
    """Neighbouring pieces of one version as one span; the last one gets the finish.

    `kv_step_oldest` of a span is the oldest of its pieces: under kv policy `keep` a node that took over has a fresher cache.
    """
    runs: list[list[Span]] = []
    for piece in pieces:
        if not piece.token_ids.size:
            continue
        if runs and runs[-1][0].version == piece.version:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    last = len(runs) - 1
    return tuple(_joined(run, finish if i == last else FinishReason.UNFINISHED) for i, run in enumerate(runs))


def _joined(run: list[Span], finish: FinishReason) -> Span:
    model = [piece.logprobs_model for piece in run if piece.logprobs_model is not None]
    return Span(
        token_ids=np.concatenate([piece.token_ids for piece in run]),
        logprobs=np.concatenate([piece.logprobs for piece in run]),
        logprobs_model=np.concatenate(model) if len(model) == len(run) else None,
        version=run[0].version,
        kv_step_oldest=min(piece.kv_step_oldest for piece in run),
        finish=finish,
    )
