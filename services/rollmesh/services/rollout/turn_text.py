"""Decode a turn to the text that a client sees, as its tokens arrive.

The text has whole characters only, and neither the string that ends a turn nor a stop string of the request. What may
become one of them is held back. Pure; collaborators: `tokenizer`, `openai` (streams the text through a parser of tool
calls).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.services.rollout.tool_calls.parsing import held_suffix
from rollmesh.shared.domain.trajectory import IntArray

_INCOMPLETE = "\ufffd"
"""Decoders write it for bytes that are not a character, or not yet."""


class TurnText:
    """The text of one turn. The pieces that `feed` and `finish` return are the same text for all cuts of the tokens
    into arrays."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """`stop` are the stop strings of the request. The text ends before the first of them."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._window, self._read = 0, 0
        """Indices in `_ids`: decoded again as the left context of new tokens, and decoded completely."""
        self._held = ""
        self._stopped = False

    def feed(self, token_ids: IntArray) -> str:
        """Return the text that is complete after the next tokens [n]. It may be empty."""
        self._ids += token_ids.tolist()
        text = self._decode(self._window, len(self._ids))
        if text.endswith(_INCOMPLETE):
            return ""
        return self._seen(self._advance(text))

    def finish(self) -> str:
        """Return the rest of the text at the end of the turn."""
        text = self._seen(self._advance(self._decode(self._window, len(self._ids))))
        rest, self._held = self._held, ""
        ends = self._tokenizer.format.turn_ends
        return text + next((rest.removesuffix(end) for end in ends if rest.endswith(end)), rest)

    def _advance(self, text: str) -> str:
        """Return the part of the decoded window that is new."""
        new = text[len(self._decode(self._window, self._read)) :]
        self._window, self._read = self._read, len(self._ids)
        return new

    def _decode(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(np.asarray(self._ids[start:stop], dtype=np.int32)) if stop > start else ""

    def _seen(self, text: str) -> str:
        """Return the new text that a client may see, and hold the rest back."""
        if self._stopped:
            return ""
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) != -1]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)]
        ends = self._tokenizer.format.turn_ends
        held = [held_suffix(text, marker) for marker in (*self._stop, *ends)]
        held += [len(end) for end in ends if text.endswith(end)]
        cut = len(text) - max(held, default=0)
        self._held = text[cut:]
        return text[:cut]
