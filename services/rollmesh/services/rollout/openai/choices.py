"""One choice of a reply: from the tokens of a turn to its content and calls, as they arrive. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollmesh.services.rollout.chat_format import ToolSchema
from rollmesh.services.rollout.conversation import ChatMessage, RequestedCall
from rollmesh.services.rollout.openai.replies import call_id
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.services.rollout.tool_calls.parsing import ParsedCall, ToolCallParser
from rollmesh.services.rollout.turn_text import TurnText
from rollmesh.shared.domain.trajectory import Segment

Part = str | RequestedCall


class ChoiceText:
    """The content and the calls of one turn."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        parser: ToolCallParser | None = None,
        tools: Sequence[ToolSchema] = (),
        turn: str = "",
        on_part: Callable[[Segment | None, list[Part]], None] | None = None,
    ) -> None:
        """Without a `parser`, all of the turn is content. `turn` identifies it, for the ids of its calls. `on_part` is
        called with each piece of the turn, None at its end, and what became complete with it."""
        self._text = TurnText(tokenizer, stop)
        self._stream = parser.stream(tools) if parser is not None else None
        self._turn = turn
        self._on_part = on_part
        self._content: list[str] = []
        self.calls: list[RequestedCall] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def message(self) -> ChatMessage:
        """The turn as the client knows it."""
        return ChatMessage(role="assistant", content=self.content, calls=tuple(self.calls))

    def begin(self, opening: str) -> None:
        """Read the text of a call's opening, with which the turn begins. Nothing is complete with it."""
        if self._stream is not None:
            self._stream.feed(opening)

    def feed(self, piece: Segment) -> None:
        """Read the next tokens of the turn."""
        text = self._text.feed(piece.token_ids)
        self._add(piece, [text] if self._stream is None else self._stream.feed(text))

    def finish(self) -> None:
        """Read the rest of the turn at its end."""
        text = self._text.finish()
        self._add(None, [text] if self._stream is None else [*self._stream.feed(text), *self._stream.finish()])

    def _add(self, piece: Segment | None, found: Sequence[str | ParsedCall]) -> None:
        parts: list[Part] = []
        for part in found:
            if isinstance(part, ParsedCall):
                call = RequestedCall(id=call_id(self._turn, len(self.calls)), name=part.name, arguments=part.arguments)
                self.calls.append(call)
                parts.append(call)
            elif part:
                self._content.append(part)
                parts.append(part)
        if self._on_part is not None:
            self._on_part(piece, parts)
