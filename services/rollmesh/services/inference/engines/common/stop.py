"""Find stop strings in sampled tokens without decoding every token of every row.

A stop string can end only in a token whose text contains its last character, or in a token that is part of a character.
One table row per sequence marks those tokens. Only they need a decode, of a short tail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.domain.trajectory import SamplingParams

Decode = Callable[[Sequence[int]], str]

STOP_ID = 1
STOP_TEXT = 2
_BROKEN = "\ufffd"
_TOKENS_PER_CHAR = 4
"""A character is at most four UTF-8 bytes, hence at most four tokens that carry text."""
_STOP_SETS_CACHED = 64


class StopRules:
    """Marks the vocabulary items that may end a sequence."""

    def __init__(self, vocab_size: int, decode: Decode | None) -> None:
        self._vocab_size = vocab_size
        self._decode = decode
        self._pieces = [] if decode is None else self._all_pieces(decode)
        self._marks_of_text = functools.lru_cache(maxsize=_STOP_SETS_CACHED)(self._mark_text)

    def check(self, params: SamplingParams, *, where: str) -> None:
        if params.stop and self._decode is None:
            raise ValueError(
                f"{where}: stop strings need tokenizer.json in the model folder; use stop_token_ids without it"
            )

    def marks(self, params: SamplingParams) -> NDArray[np.uint8]:
        """Return flags [vocab]: STOP_ID ends the sequence, STOP_TEXT requires a call of `ends_text`."""
        marks = np.zeros(self._vocab_size, np.uint8)
        if params.stop:
            marks |= self._marks_of_text(params.stop)
        marks[list(params.stop_token_ids)] |= STOP_ID
        return marks

    def ends_text(self, new_tokens: NDArray[np.int32], stop: tuple[str, ...]) -> bool:
        """Return whether the text of the new tokens has a stop string that ends in the last token."""
        assert self._decode is not None
        tail = _TOKENS_PER_CHAR * (max(map(len, stop)) + 2)
        text = self._decode(new_tokens[-tail:].tolist())
        return any(string in text for string in stop)

    def first_stop(
        self, params: SamplingParams, marks: NDArray[np.uint8], before: Sequence[int], tokens: NDArray[np.int32]
    ) -> int | None:
        """Return how many of the new `tokens` [n] count if one of them ends the sequence, else None.

        `marks` are those of `params`, and `before` are the tokens before `tokens` in which a stop string may begin.
        """
        for index in np.flatnonzero(marks[tokens]).tolist():
            new = np.array([*before, *tokens[: index + 1].tolist()], np.int32)
            if marks[tokens[index]] & STOP_ID or self.ends_text(new, params.stop):
                return int(index) + 1
        return None

    def _all_pieces(self, decode: Decode) -> list[str]:
        """Return the text of each token alone and after another token, because decoders may drop a leading space."""
        anchor = len(decode([0]))
        return [decode([token]) + decode([0, token])[anchor:] for token in range(self._vocab_size)]

    def _mark_text(self, stop: tuple[str, ...]) -> NDArray[np.uint8]:
        last = {string[-1] for string in stop} | {_BROKEN}
        hits = (not last.isdisjoint(piece) for piece in self._pieces)
        return np.fromiter(hits, bool, self._vocab_size).astype(np.uint8) * np.uint8(STOP_TEXT)


def load_decode(folder: Path) -> Decode | None:
    """Return the decoder of the tokenizer in a model folder, or None if it has none; stop strings are then rejected."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    with libraries_needed("a tokenizer"):
        from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(path))
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
