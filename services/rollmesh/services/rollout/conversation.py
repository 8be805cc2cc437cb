"""Encode messages that a client appends to a recorded conversation, and conversations that begin.

The recorded part is never encoded again. The model's chat template renders the whole conversation, with a mark in place
of the text of the last recorded turn; what it writes after that turn is encoded and appended. For a template whose text
of a turn does not depend on later messages, recorded and appended tokens together are those of `apply_chat_template`.
Where a template does rewrite earlier turns, such as one that drops the reasoning of earlier answers, the recorded
tokens stay as the model wrote them.

Contents are plain text: before a message is rendered, a character that occurs nowhere breaks the tags in its texts, and
the tokenizer removes it. A tool's output therefore cannot open a turn. Pure; collaborators: `tokenizer` (renders,
encodes), `openai/protocol` (reads messages).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.shared.errors import InvalidInput, field_error

_GUARDS = range(0xE000, 0xF900)
"""The private use area of Unicode. Contents rarely use it, and no tag does."""
_MARK = "rollmeshturn"
_CHARS_PER_TOKEN = 8
"""More than the mean of ordinary texts."""
NO_LIMIT = 2**31


class RequestedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in a message of the assistant."""

    id: str
    name: str
    arguments: str
    """JSON as the client knows it, normally an object."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation as a client knows it."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    calls: tuple[RequestedCall, ...] = ()
    call_id: str = ""
    """Id of the call that a message of role tool answers."""
    name: str = ""
    reasoning: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """The message without differences that clients make when they send it again. Hashable.

        They may write JSON in another way, and name the assistant.
        """
        calls = tuple((call.id, call.name, _canonical(call.arguments)) for call in self.calls)
        name = "" if self.role == "assistant" else self.name
        return (self.role, self.content, calls, self.call_id, name, self.reasoning)


def prompt_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSchema],
    *,
    tokens_max: int = NO_LIMIT,
) -> IntArray:
    """Return the tokens of a new conversation up to the start of the assistant's turn, [n] int32.

    With more than `tokens_max` tokens, the result may be only their beginning, which also has more. Raise
    `InvalidInput` if the template rejects the messages.
    """
    guard = _unused_character(messages, tools)
    return _encoded(tokenizer, _render(tokenizer, messages, tools, guard), guard, tokens_max)


def appended_tokens(
    tokenizer: Tokenizer,
    history: Sequence[ChatMessage],
    last_turn: IntArray,
    new: Sequence[ChatMessage],
    tools: Sequence[ToolSchema],
    *,
    tokens_max: int = NO_LIMIT,
) -> IntArray:
    """Return the tokens that continue a recorded conversation with new messages, up to the start of the assistant's
    turn, [n] int32.

    `history` ends with the recorded turn of the assistant, whose tokens are `last_turn`. If they do not end with the
    end of a turn, such as after the limit of tokens, the result begins with it. `tokens_max` and errors are as in
    `prompt_tokens`.
    """
    *earlier, last = history
    if last.role != "assistant":
        raise ValueError(f"`history` must end with a message of the assistant, got role {last.role}")
    guard, mark = _unused_character([*history, *new], tools), _unused_mark([*history, *new])
    text = _render_marked(tokenizer, earlier, last, new, tools, guard, mark)
    at = text.rfind(mark)
    ends = [(found, end) for end in tokenizer.format.turn_ends if (found := text.find(end, at + len(mark))) != -1]
    if at == -1 or not ends:
        raise InvalidInput(
            "the chat template must write the assistant's turn and its end when messages follow, so that they can be "
            "appended; it writes no turn; use another chat template"
        )
    begin, end = min(ends)
    # With the end of the turn, because tokenizers may encode a text after a tag in another way than at the beginning.
    token_ids = _encoded(tokenizer, text[begin:], guard, tokens_max)
    if not ends_turn(tokenizer, last_turn):
        return token_ids
    if int(token_ids[0]) == tokenizer.token_id(end):
        return token_ids[1:]
    return _encoded(tokenizer, text[begin + len(end) :], guard, tokens_max)


def turn_tokens(
    tokenizer: Tokenizer, history: Sequence[ChatMessage], turn: ChatMessage, tools: Sequence[ToolSchema]
) -> IntArray:
    """Return the tokens that a model would write for a given turn of the assistant after `history`, [n] int32.

    They begin where the generation prompt ends, and end with the end of the turn. Raise `InvalidInput` if the template
    rejects the messages, or does not write the turn after its generation prompt.
    """
    guard = _unused_character([*history, turn], tools)
    begun = _render(tokenizer, history, tools, guard)
    whole = _render(tokenizer, [*history, turn], tools, guard, prompt=False)
    if whole.startswith(begun) and not any(end in whole[len(begun) :] for end in tokenizer.format.turn_ends):
        # The turn ends where the next role begins.
        followed = _render(tokenizer, [*history, turn, *_next_messages(turn)], tools, guard, prompt=False)
        whole += _first_end(tokenizer, followed[len(whole) :]) if followed.startswith(whole) else ""
    # Some templates write tools in another place once the turn follows. Then what stands between the last message and
    # the turn is looked for.
    last = begun if whole.startswith(begun) else begun[max(0, begun.rfind(history[-1].content)) :]
    text = whole[found + len(last) :] if (found := whole.rfind(last)) != -1 else ""
    at, end = max((text.rfind(end), end) for end in tokenizer.format.turn_ends)
    if at == -1:
        raise InvalidInput(
            "the chat template does not continue its generation prompt with this turn of the assistant and an end of "
            "the turn; use another chat template"
        )
    return tokenizer.encode_rendered(text[: at + len(end)], guard)


def _next_messages(turn: ChatMessage) -> list[ChatMessage]:
    """Return messages that may follow a turn of the assistant."""
    results = [ChatMessage(role="tool", content="result", call_id=call.id, name=call.name) for call in turn.calls]
    return results or [ChatMessage(role="user", content="question")]


def _first_end(tokenizer: Tokenizer, text: str) -> str:
    """Return the end of a turn with which the text begins, with the white space before it; empty if it begins with
    another text."""
    space = text[: len(text) - len(text.lstrip())]
    return next((space + end for end in tokenizer.format.turn_ends if text[len(space) :].startswith(end)), "")


def raw_tokens(tokenizer: Tokenizer, text: str, *, tokens_max: int = NO_LIMIT) -> IntArray:
    """Return the tokens of a text that the client has rendered, [n] int32. Its tags are special tokens. `tokens_max`:
    `prompt_tokens`."""
    return _encoded(tokenizer, text, _unused_character([ChatMessage(role="user", content=text)], ()), tokens_max)


def ends_turn(tokenizer: Tokenizer, token_ids: IntArray) -> bool:
    """Return whether the tokens of a turn end with one of the strings that end a turn."""
    for end in tokenizer.format.turn_ends:
        number = tokenizer.token_id(end)
        if number is not None and token_ids.size and int(token_ids[-1]) == number:
            return True
        # Each token is at least one byte, whatever tokens the model has chosen for the text.
        if number is None and tokenizer.decode(token_ids[-len(end.encode()) :]).endswith(end):
            return True
    return False


def _encoded(tokenizer: Tokenizer, text: str, guard: str, tokens_max: int) -> IntArray:
    """Encode a rendered text, or only the beginning of one that is too long, because encoding megabytes takes
    seconds."""
    if len(text) > (chars_max := _CHARS_PER_TOKEN * tokens_max):
        begun = tokenizer.encode_rendered(text[:chars_max], guard)
        if begun.size > tokens_max:
            return begun
    return tokenizer.encode_rendered(text, guard)


# Rendering ------------------------------------------------------------------------------------------------------------


def _render_marked(
    tokenizer: Tokenizer,
    earlier: Sequence[ChatMessage],
    last: ChatMessage,
    new: Sequence[ChatMessage],
    tools: Sequence[ToolSchema],
    guard: str,
    mark: str,
) -> str:
    """Render a conversation with `mark` for the texts of its last recorded turn."""
    arguments = json.dumps({"text": mark})
    marked = replace(
        last, content=mark, reasoning="", calls=tuple(replace(call, arguments=arguments) for call in last.calls)
    )
    recorded = [*earlier, marked]
    try:
        return _render(tokenizer, [*recorded, *new], tools, guard)
    except InvalidInput:
        if all(len(message.calls) <= 1 for message in recorded):
            raise
        # Some templates write at most one call per turn. What they would write for a recorded turn is not used.
        recorded = [replace(message, calls=message.calls[:1]) for message in recorded]
        return _render(tokenizer, [*recorded, *new], tools, guard)


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSchema],
    guard: str,
    *,
    prompt: bool = True,
) -> str:
    """Render messages and tools with `guard` in the tags of their texts. Raise `InvalidInput` that names the field
    `messages`.

    A turn of the assistant may contain tags that are not special, such as those around its reasoning, which templates
    look for.
    """
    words = tokenizer.format
    every = _tag_pattern(tuple(tokenizer.tags))
    special = _tag_pattern(tuple(tag for tag, is_special in tokenizer.tags.items() if is_special))
    if not words.renders_results:
        messages = _without_tool_roles(messages, words)
    written = [
        _template_message(m, _breaker(special if m.role == "assistant" else every, guard), words) for m in messages
    ]
    described = json.loads(_breaker(every, guard)(_tools_text(tools)))
    try:
        return tokenizer.render(written, described, prompt=prompt)
    except InvalidInput as err:
        raise field_error("messages", "fit the chat template", err) from err


def _template_message(message: ChatMessage, plain: Callable[[str], str], words: ChatFormat) -> dict[str, Any]:
    """Return a message as chat templates expect it. `plain` breaks the tags in a text."""
    written: dict[str, Any] = {"role": message.role, "content": plain(message.content)}
    if message.reasoning:
        written["reasoning_content"] = plain(message.reasoning)
    if message.name:
        written["name"] = plain(message.name)
    if message.call_id:
        written["tool_call_id"] = plain(message.call_id)
    if message.calls:
        written["tool_calls"] = [
            {"id": plain(call.id), "type": "function", "function": _template_function(call, plain, words)}
            for call in message.calls
        ]
    return written


def _template_function(call: RequestedCall, plain: Callable[[str], str], words: ChatFormat) -> dict[str, Any]:
    arguments = plain(call.arguments)
    return {
        "name": plain(call.name),
        "arguments": arguments if words.arguments_as_text else _object_or_text(arguments),
    }


def _without_tool_roles(messages: Sequence[ChatMessage], words: ChatFormat) -> list[ChatMessage]:
    """Return calls as text of the assistant and results as text of the user, for a template that cannot write tool
    results."""
    plain: list[ChatMessage] = []
    for message in messages:
        if message.role == "assistant" and message.calls:
            called = "".join(
                f"{words.tool_call_start}{_call_text(c, words)}{words.tool_call_end}" for c in message.calls
            )
            message = replace(message, content=message.content + called, calls=())
        elif message.role == "tool":
            message = ChatMessage(role="user", content=message.content)
        if plain and plain[-1].role == message.role == "user":  # such templates require that the roles alternate
            message = replace(message, content=f"{plain.pop().content}\n{message.content}")
        plain.append(message)
    return plain


def _call_text(call: RequestedCall, words: ChatFormat) -> str:
    arguments = _object_or_text(call.arguments)
    if words.tool_call_body == "json":
        return json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    if isinstance(arguments, dict) and words.tool_call_body == "pythonic":
        return f"[{call.name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    if isinstance(arguments, dict) and words.tool_call_body == "xml":
        given = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"\n<function={call.name}>\n{given}</function>\n"
    if words.tool_call_body == "named_json":
        separator = words.tool_call_separator.replace("{id}", call.id)
        return f"{call.name}{separator}{json.dumps(arguments, ensure_ascii=False)}"
    if isinstance(arguments, dict) and words.tool_call_body == "arg_tags":
        return f"{call.name}\n" + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
    return str(next(iter(arguments.values()), "")) if isinstance(arguments, dict) else arguments


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# Texts ----------------------------------------------------------------------------------------------------------------


def _object_or_text(arguments: str, number: Callable[[str], float] | None = None) -> dict[str, Any] | str:
    """Return arguments as an object, which templates expect, or the text itself if it is not one. `number` reads
    fractions."""
    try:
        value = json.loads(arguments or "{}", parse_float=number)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _canonical(arguments: str) -> str:
    """Return one text for all ways to write the same JSON object. Clients in JavaScript write 2.0 as 2."""
    value = _object_or_text(arguments, _whole_or_float)
    try:
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    except RecursionError:
        return arguments


def _whole_or_float(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _texts(messages: Iterable[ChatMessage]) -> Iterable[str]:
    for message in messages:
        yield from (message.content, message.reasoning, message.name, message.call_id)
        for call in message.calls:
            yield from (call.id, call.name, call.arguments)


def _tools_text(tools: Sequence[ToolSchema]) -> str:
    return json.dumps(list(tools), ensure_ascii=False)


def _unused_character(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> str:
    """Return a character that none of the texts contains."""
    used = set(_tools_text(tools)).union(*map(set, _texts(messages)))
    guard = next((chr(code) for code in _GUARDS if chr(code) not in used), None)
    if guard is None:
        must = "leave one character of U+E000 to U+F8FF unused"
        raise field_error("messages", must, None, "remove such characters")
    return guard


def _unused_mark(messages: Sequence[ChatMessage]) -> str:
    """Return a word that none of the texts contains. It is longer than every run of the word in them."""
    mark = _MARK
    while any(mark in text for text in _texts(messages)):
        mark += _MARK
    return mark


def _breaker(tags: re.Pattern[str], guard: str) -> Callable[[str], str]:
    """Return a function that puts `guard` after the first character of each tag in a text."""
    return lambda text: tags.sub(lambda found: f"{found.group()[0]}{guard}{found.group()[1:]}", text)


@lru_cache(maxsize=32)
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the tags, or one that never matches."""
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))) or r"(?!)")
