"""Encode Python values as JSON and decode them, between a candidate's jail and its hidden tests: plain data only,
distinguished by tags.

Numbers, text, booleans, None and lists use their JSON form; every JSON object is one tag with its content. Decoding
creates values of Python's own classes and handles of objects, never an instance of a foreign class: equality, truth and
arithmetic are then decided by Python and not by the sender.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque,
    "range": lambda bounds: range(*bounds), "complex": lambda parts: complex(*parts),
    "keys": lambda keys: dict.fromkeys(keys).keys(), "iterator": iter,
}  # fmt: skip
"""Tag -> function that builds the value from the list of its parts."""
_PARTS: dict[type, Callable[[Any], tuple[str, list[Any]]]] = {
    range: lambda value: ("range", [value.start, value.stop, value.step]),
    complex: lambda value: ("complex", [value.real, value.imag]),
    type({}.keys()): lambda value: ("keys", list(value)),
}
_VIEWS: tuple[type[Iterable[Any]], ...] = (type({}.values()), type({}.items()))
_BASES: tuple[Callable[[Any], Any], ...] = (
    int, float, complex, str, list, dict, tuple, set, frozenset, deque, bytes
)  # fmt: skip
_BY_TEXT: dict[str, tuple[str, Callable[[Any], str], Callable[[Any, str], Any]]] = {
    "Decimal": ("decimal", str, lambda kind, text: kind(text)),
    "Fraction": ("fractions", str, lambda kind, text: kind(text)),
    "UUID": ("uuid", str, lambda kind, text: kind(text)),
    "datetime": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "date": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "time": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "timedelta": (
        "datetime",
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda kind, text: kind(*map(int, text.split())),
    ),
}
"""Class -> module, and conversions to and from a text that fully represents the value. A subclass is before its
base."""
_INT_BITS_MAX = 14_000
"""Python converts larger integers only to and from hexadecimal digits."""
_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def encode(value: Any, keep: Callable[[object], dict[str, Any]]) -> Any:
    """Encode a value as plain JSON values. `keep` creates the tag and the content of a value without a form here."""
    kind = type(value)
    if kind is int and value.bit_length() > _INT_BITS_MAX:
        return {"int": hex(value)}
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if value - value == 0 else {"float": repr(value)}
    if kind is list:
        return [encode(entry, keep) for entry in value]
    if kind is dict:
        return {"dict": [[encode(key, keep), encode(entry, keep)] for key, entry in value.items()]}
    if kind in (tuple, set, frozenset, deque):
        return {kind.__name__: [encode(entry, keep) for entry in value]}
    if kind in (bytes, bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if kind in _PARTS:
        tag, parts = _PARTS[kind](value)
        return {tag: [encode(part, keep) for part in parts]}
    return _encode_other(value, keep)


def _encode_other(value: Any, keep: Callable[[object], dict[str, Any]]) -> Any:
    """Encode subclasses of builtin types (enums, named tuples, counters, numpy's scalars) as the builtin, and other
    objects with `keep`."""
    for base in _BASES:
        if isinstance(value, base):  # type: ignore[arg-type]
            return encode(base(value), keep)
    if isinstance(value, _VIEWS):
        return encode(list(value), keep)
    for name, (module, to_text, _) in _BY_TEXT.items():
        if isinstance(value, getattr(sys.modules.get(module), name, ())):
            return {name: to_text(value)}
    if callable(to_list := getattr(value, "tolist", None)):
        return encode(to_list(), keep)
    return keep(value)


def decode(plain: Any, take: Callable[[str, Any], Any]) -> Any:
    """Decode plain JSON values. `take` creates the value of an unknown tag from its content. Raises ValueError or
    TypeError for values that `encode` never creates."""
    if isinstance(plain, list):
        return [decode(entry, take) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise ValueError("an object must have one tag")
    ((tag, content),) = plain.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([decode(entry, take) for entry in _list(content)])
    if tag == "dict":
        return {decode(key, take): decode(entry, take) for key, entry in map(_list, _list(content))}
    if tag == "float":
        return _FLOATS[content]
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "int":
        return int(content, 16)
    if tag in _BY_TEXT:
        module, _, from_text = _BY_TEXT[tag]
        return from_text(getattr(importlib.import_module(module), tag), str(content))
    return take(tag, content)


def loads(text: str) -> Any:
    """Decode strict JSON. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("the content of the tag must be a list")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
