"""A policy that is a table, behind the generator of a local mesh: it samples by the seed of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from rollmesh.shared.clients.generated import Target
from rollmesh.shared.domain.trajectory import (
    EpisodeKey,
    FinishReason,
    IntArray,
    SamplingParams,
    Segment,
    sampled_segment,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.testing.rollout import CharTokenizer, Gate, LocalMesh

END = "<|end|>"
Table = Callable[[str], Mapping[str, float]]
"""The answer so far -> probability of each next token, a character or a tag."""


class TableGenerator:
    """Generates one token per segment, with the outputs entropy and top_k, k = 2."""

    def __init__(self, tokenizer: CharTokenizer, table: Table, step: int = 0) -> None:
        self._tokenizer, self.table, self.step = tokenizer, table, step
        self.gate = Gate()
        self.streams: list[TableStream] = []

    def open(
        self, token_ids: IntArray, params: SamplingParams, *, target: Target, session: str, key: EpisodeKey
    ) -> TableStream:
        answer = self._tokenizer.decode(token_ids).rpartition("<|assistant|>")[2]
        tokens = list(self._tokens(answer, params))
        finish = FinishReason.STOP if tokens and tokens[-1][0] == END else FinishReason.LENGTH
        self.streams.append(TableStream(self, answer, [self._segment(*token) for token in tokens], finish))
        return self.streams[-1]

    def _tokens(self, answer: str, params: SamplingParams) -> Iterator[tuple[str, Mapping[str, float]]]:
        rng = np.random.default_rng(params.seed)
        for _ in range(params.max_tokens):
            odds = self.table(answer)
            token = str(rng.choice(list(odds), p=list(odds.values())))
            yield token, odds
            answer += token
            if token == END:
                return

    def _segment(self, token: str, odds: Mapping[str, float]) -> Segment:
        other = {"z": 1e-9} if len(odds) == 1 else {}
        top = sorted({**other, **odds}.items(), key=lambda entry: -entry[1])[:2]
        p = np.array(list(odds.values()))
        logprobs = np.log([odds[token]]).astype(np.float32)
        arrays = {
            "entropy": np.array([-(p * np.log(p)).sum()], dtype=np.float32),
            "top_k_ids": np.array([[self._id(name) for name, _ in top]], dtype=np.int32),
            "top_k_logprobs": np.log([[p for _, p in top]]).astype(np.float32),
        }
        version = PolicyVersion(policy="main", step=self.step)
        ids = np.array([self._id(token)], dtype=np.int32)
        return sampled_segment(ids, logprobs, version, logprobs_model=logprobs, kv_step_oldest=self.step, arrays=arrays)

    def _id(self, token: str) -> int:
        (number,) = self._tokenizer.encode_markup(token).tolist()
        return int(number)


@dataclass
class TableStream:
    """One generation: what it continued, and how much of it was read before it was closed."""

    generator: TableGenerator
    answer: str
    pieces: list[Segment]
    end: FinishReason
    finish: FinishReason = FinishReason.UNFINISHED
    num_read: int = 0
    is_open: bool = False

    async def __aenter__(self) -> Self:
        self.is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        await self.generator.gate.enter()
        if self.num_read == len(self.pieces):
            self.finish = self.end
            raise StopAsyncIteration
        self.num_read += 1
        return self.pieces[self.num_read - 1]


def table_mesh(table: Table, step: int = 0, **settings: object) -> tuple[LocalMesh, TableGenerator]:
    """Return a mesh whose model is the table."""
    mesh = LocalMesh(script=lambda text: "", **settings)  # type: ignore[arg-type]
    generator = TableGenerator(mesh.tokenizer, table, step)
    mesh.generator = generator  # type: ignore[assignment]
    return mesh, generator


def answers(mesh: LocalMesh, number: int = -1) -> Sequence[str]:
    """Return the answers of the samples of an episode, as scorers read them."""
    episode = mesh.samples.episodes[number]
    texts = [
        mesh.tokenizer.decode(np.concatenate([s.token_ids for s in episode.path_segments(sample)]))
        for sample in episode.samples
    ]
    return [text.rpartition("<|assistant|>")[2] for text in texts]
