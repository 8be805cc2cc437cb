"""Read tool calls that are written as a list of Python calls: `[name(argument=value, ...), ...]`. Pure.

The text comes from a model, so it is not compiled: this reader accepts literals with a limited depth and nothing else.
JSON's true, false and null are literals too, because models mix both.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from rollmesh.services.rollout.tool_calls.json_calls import made_call
from rollmesh.services.rollout.tool_calls.parsing import MalformedCall, ParsedCall

DEPTH_MAX = 64
"""Maximum number of lists and dicts around a value."""
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))"""
    r"""|(?P<name>[A-Za-z_][\w.-]*)|(?P<sign>[\[\](){},=:]))""",
    re.DOTALL,
)
_NAMED = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def read_python_calls(text: str) -> list[ParsedCall]:
    """Return the calls of a list, at least one. Raise `MalformedCall`."""
    reader = _Reader(text)
    reader.take("[")
    calls = [_call(reader)]
    while reader.have(","):
        calls.append(_call(reader))
    reader.take("]")
    reader.end()
    return calls


def _call(reader: _Reader) -> ParsedCall:
    name = reader.name()
    arguments: dict[str, Any] = {}
    reader.take("(")
    while not reader.have(")"):
        key = reader.name()
        if key in arguments:
            raise MalformedCall(f"a tool call must name each argument once, got {key} twice")
        reader.take("=")
        arguments[key] = _value(reader, 0)
        if not reader.have(","):
            reader.take(")")
            break
    return made_call(name, arguments)


def _value(reader: _Reader, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise MalformedCall(f"the arguments of a tool call must have at most {DEPTH_MAX} nested lists and dicts")
    kind, token = reader.next()
    if kind in ("string", "number"):
        return _literal(token)
    if kind == "name" and token in _NAMED:
        return _NAMED[token]
    if token in ("[", "("):
        return _items(reader, "]" if token == "[" else ")", depth)
    if token == "{":
        return _dict(reader, depth)
    raise MalformedCall(f"the arguments of a tool call must be literals, got {token!r}")


def _items(reader: _Reader, closing: str, depth: int) -> list[Any]:
    items = []
    while not reader.have(closing):
        items.append(_value(reader, depth + 1))
        if not reader.have(","):
            reader.take(closing)
            break
    return items


def _dict(reader: _Reader, depth: int) -> dict[str, Any]:
    items: dict[str, Any] = {}
    while not reader.have("}"):
        key = _value(reader, depth + 1)
        if not isinstance(key, str):
            raise MalformedCall(f"the keys of a dict in a tool call must be strings, got {key!r}")
        reader.take(":")
        items[key] = _value(reader, depth + 1)
        if not reader.have(","):
            reader.take("}")
            break
    return items


def _literal(token: str) -> Any:
    try:
        return ast.literal_eval(token)  # one string or one number, so there is nothing to nest
    except (SyntaxError, ValueError) as err:  # an escape that does not exist, or too many digits
        raise MalformedCall(f"the arguments of a tool call must be literals, got {token[:100]!r}: {err}") from err


class _Reader:
    """The tokens of a text, from the left."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text.strip(), 0

    def next(self) -> tuple[str, str]:
        """Return kind and text of the next token, and skip it."""
        found = _TOKEN.match(self._text, self._at)
        if found is None or found.lastgroup is None:
            raise MalformedCall(f"a tool call must be a list of Python calls, got an error at character {self._at}")
        self._at = found.end()
        return found.lastgroup, found.group(found.lastgroup)

    def have(self, sign: str) -> bool:
        """Return whether the next token is this sign, and skip it if so."""
        before = self._at
        if before < len(self._text) and self.next() == ("sign", sign):
            return True
        self._at = before
        return False

    def take(self, sign: str) -> None:
        """Skip this sign, which must be next."""
        if not self.have(sign):
            raise MalformedCall(f"a tool call must have {sign!r} at character {self._at}")

    def name(self) -> str:
        """Return the next token, which must be a name, and skip it."""
        kind, token = self.next()
        if kind != "name":
            raise MalformedCall(f"a tool call must have a name before {token!r}")
        return token

    def end(self) -> None:
        """Raise unless all of the text is read."""
        if self._at != len(self._text):
            raise MalformedCall(f"a tool call must be all of the turn, got more text at character {self._at}")
