"""Record the segment tree of an episode and derive its samples. Pure: without tokenizer, clock and network.

Invariants: parents precede children; sampled segments carry log-probs and version as the engine gave them; a generation
that several versions sampled is a chain of segments, all but the last UNFINISHED.

Seeds: every generation has a separate seed, derived from the episode's seed and the child indices on its path in the
tree. It does not depend on the order in which concurrent branches run. A retry of the episode therefore draws the same
tokens, and two continuations of one prefix draw different ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import (
    ROOT,
    FinishReason,
    IntArray,
    Message,
    Role,
    Sample,
    SamplingParams,
    Segment,
    Source,
    ToolOutcome,
    text_view,
)

_MASK64 = 2**64 - 1


@dataclass(slots=True)
class _TreeNode:
    """The source of seeds for the generations below a segment."""

    key: int
    num_children: int = 0

    def next_key(self) -> int:
        self.num_children += 1
        return mix64(self.key + self.num_children)


class Recorder:
    """Segments in the order of their creation."""

    def __init__(self, seed: int) -> None:
        self.segments: list[Segment] = []
        self.sampling_params: list[SamplingParams] = []
        self._sampling_index: dict[SamplingParams, int] = {}
        self._root = _TreeNode(seed & _MASK64)
        self._tree_nodes: list[_TreeNode] = []

    def add_given(
        self,
        parent: int,
        role: Role,
        source: Source,
        token_ids: IntArray,
        messages: Sequence[Message] = (),
        *,
        train: bool = False,
        finish: FinishReason = FinishReason.UNFINISHED,
        tool: ToolOutcome | None = None,
    ) -> int:
        """Record tokens that were not sampled here; return their segment. `train` gives them loss, without
        log-probs."""
        key = self._tree_node(parent).next_key()
        segment = Segment(
            parent=parent,
            role=role,
            source=source,
            token_ids=token_ids,
            loss_mask=np.ones(token_ids.shape, dtype=np.uint8) if train else None,
            finish=finish,
            messages=tuple(messages),
            tool=tool,
        )
        return self._append(segment, key)

    def add_segment(self, parent: int, segment: Segment, params: SamplingParams | None) -> int:
        """Record a segment of a finished episode of another source below `parent`; return its index. `params` are those
        with which it was sampled, if they are known."""
        key = self._tree_node(parent).next_key()
        sampling = self._sampling_of(params) if params is not None else -1
        return self._append(replace(segment, parent=parent, sampling=sampling), key)

    def keep_draws(self, index: int) -> None:
        """Let the generations below a given segment have the seeds that those below its parent would have without it.
        Nothing else may continue the parent."""
        self._tree_nodes[index].key = self._tree_node(self.segments[index].parent).key

    def draw_key(self, parent: int) -> int:
        """Return the seed of the next generation below `parent`."""
        return self._tree_node(parent).next_key()

    def add_generated(
        self, parent: int, pieces: Sequence[Segment], params: SamplingParams, *, train: bool, message: Message
    ) -> int:
        """Record a generation, one segment per version; return the index of the last one."""
        assert pieces, "a generation has at least one segment"
        sampling = self._sampling_of(params)
        for piece in pieces:
            mask = np.ones(piece.token_ids.shape, dtype=np.uint8) if train else None
            messages = (message,) if piece is pieces[-1] else ()
            segment = replace(piece, parent=parent, loss_mask=mask, sampling=sampling, messages=messages)
            parent = self._append(segment, mix64(params.seed))
        return parent

    def path(self, leaf: int) -> list[int]:
        """Return the segments from the root to `leaf`."""
        chain = []
        while leaf != ROOT:
            chain.append(leaf)
            leaf = self.segments[leaf].parent
        return chain[::-1]

    def messages(self, leaf: int) -> tuple[Message, ...]:
        """Return the text view of the path to `leaf`."""
        return text_view(self.segments[index] for index in self.path(leaf))

    def leaves(self, without: Collection[int] = ()) -> list[int]:
        """Return the last action of every path, in order. Later segments have no loss, and earlier ones belong to the
        path.

        A path ends before the segments `without`.
        """
        covered: set[int] = set()
        actions = [i for i, segment in enumerate(self.segments) if segment.role is Role.ACTION and i not in without]
        for index in reversed(actions):
            parent = self.segments[index].parent
            while parent != ROOT and parent not in covered:
                covered.add(parent)
                parent = self.segments[parent].parent
        return [index for index in actions if index not in covered]

    def turns(self, leaf: int) -> list[int]:
        """Return the last segment of each turn on the path to `leaf`, as `JudgedTurn.segment`."""
        actions = [index for index in self.path(leaf) if self.segments[index].role is Role.ACTION]
        return [i for i in actions if i == actions[-1] or self.segments[i].finish is not FinishReason.UNFINISHED]

    def last_action(self, leaf: int) -> int | None:
        """Return the last action on the path to `leaf`, or None if the path has no action."""
        while leaf != ROOT and self.segments[leaf].role is not Role.ACTION:
            leaf = self.segments[leaf].parent
        return None if leaf == ROOT else leaf

    def _append(self, segment: Segment, key: int) -> int:
        index = len(self.segments)
        assert ROOT <= segment.parent < index
        self.segments.append(segment)
        self._tree_nodes.append(_TreeNode(key))
        return index

    def _tree_node(self, parent: int) -> _TreeNode:
        return self._root if parent == ROOT else self._tree_nodes[parent]

    def _sampling_of(self, params: SamplingParams) -> int:
        index = self._sampling_index.setdefault(params, len(self.sampling_params))
        if index == len(self.sampling_params):
            self.sampling_params.append(params)
        return index


def numbered_samples(episode: str, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the samples with ids that are unique in the run and equal in every attempt of the episode."""
    return tuple(replace(sample, sample_id=f"{episode}-{number}") for number, sample in enumerate(samples))


def mix64(value: int) -> int:
    """Return a 64-bit hash of a 64-bit number, by the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
