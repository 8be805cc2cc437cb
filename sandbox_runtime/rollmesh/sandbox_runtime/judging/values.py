"""Python values as JSON and back, between a candidate's jail and its hidden tests: builtin types only, kept apart by tags.

Numbers, text, booleans, None and lists are JSON's own; every JSON object is one tag with its content. Decoding makes builtin values and
handles of objects, never an instance of a foreign class: equality, truth and arithmetic are then Python's, not the sender's.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_BASES: tuple[Callable[[Any], Any], ...] = (int, float, str, list, dict, tuple, set, frozenset, bytes)
_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def encode(value: Any, keep: Callable[[object], Any]) -> Any:
    """Plain JSON values for a value; `keep` makes the content of the tag `object` of what has no form of its own."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if value - value == 0 else {"float": repr(value)}
    if kind is list:
        return [encode(entry, keep) for entry in value]
    if kind is dict:
        return {"dict": [[encode(key, keep), encode(entry, keep)] for key, entry in value.items()]}
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [encode(entry, keep) for entry in value]}
    if kind in (bytes, bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    return _encode_other(value, keep)


def _encode_other(value: Any, keep: Callable[[object], Any]) -> Any:
    """Subclasses of builtin types (enums, named tuples, counters, numpy's scalars) as the builtin; objects by handle."""
    for base in _BASES:
        if isinstance(value, base):  # type: ignore[arg-type]
            return encode(base(value), keep)
    if callable(to_list := getattr(value, "tolist", None)):
        return encode(to_list(), keep)
    return {"object": keep(value)}


def decode(plain: Any, take: Callable[[Any], Any]) -> Any:
    """The value of plain JSON values; `take` makes the handle of an object. ValueError or TypeError for what `encode` never makes."""
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
    if tag == "object":
        return take(content)
    raise ValueError(f"unknown tag {tag!r}")


def loads(text: str) -> Any:
    """Strict JSON. ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("the content of the tag must be a list")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
