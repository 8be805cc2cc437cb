"""The candidate's side of hidden tests that call it: looks up names, calls functions, copies objects, and keeps objects
that are not plain data.

As in `candidate`, nothing here is trusted: it runs beside the candidate's code and sends only data.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import sys
from collections.abc import Callable
from typing import Any

from rollmesh.sandbox_runtime.judging.candidate import MODULE
from rollmesh.sandbox_runtime.judging.values import decode, encode

NAMES_MAX = 10_000
"""Maximum public names of the module that are reported."""
TEXT_CHARS_MAX = 8_000
"""Maximum characters of an exception's text, of its arguments, and of its attributes; more attributes are omitted."""
CAUSES_MAX = 4
"""Maximum depth of the exceptions within an exception."""
OBJECTS_MAX = 10_000
ITEMS_MAX = 10_000
"""Maximum items of one copied object."""
_objects: list[object] = []
_numbers: dict[int, int] = {}
"""Numbers of the kept objects, by identity."""


def look_up(name: str) -> str:
    """Look up an attribute of the candidate's module, or of object N for `@N.name`. Returns `{"value": ...}`,
    `{"callable": true}`, `{"exception": [names of the class and its bases]}` or `{"error": [...]}`."""

    def found() -> dict[str, Any]:
        number, _, attribute = name.removeprefix("@").partition(".")
        target = _of(int(number), attribute) if name.startswith("@") else _of(None, name)
        if isinstance(target, type) and issubclass(target, Exception):
            return {"exception": _names(target)}
        return {"callable": True} if callable(target) else {"value": encode(target, _keep)}

    return _replied(found)


def invoke(question: str) -> str:
    """Call `name`, or method `name` of `object`, with `arguments` and `keywords`. Returns `{"value": ...}` or
    `{"error": [...]}`."""

    def called() -> dict[str, Any]:
        asked = json.loads(question)
        arguments = decode(asked["arguments"], _take)
        keywords = decode(asked["keywords"], _take)
        return {"value": encode(_of(asked["object"], asked["name"])(*arguments, **keywords), _keep)}

    return _replied(called)


def names(_: str) -> str:
    """List what `from solution import *` imports. Returns `{"value": [names]}` or `{"error": [...]}`."""

    def listed() -> dict[str, Any]:
        module = sys.modules[MODULE]
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        return {"value": [str(name) for name in public][:NAMES_MAX]}

    return _replied(listed)


def contents(number: str) -> str:
    """Copy object N. Returns `{"value": ...}`: a dict for a mapping, a list for another iterable, and a number for an
    object that has only a length."""
    return _replied(lambda: {"value": encode(_copied(_objects[int(number)]), _keep)})


def _copied(value: Any) -> dict[Any, Any] | list[Any] | int:
    kind = type(value)
    if not hasattr(kind, "__iter__"):
        return len(value)
    if hasattr(kind, "keys") and hasattr(kind, "__getitem__"):
        return {key: value[key] for key in _bounded(value.keys())}
    return _bounded(value)


def _bounded(items: Any) -> list[Any]:
    found = list(itertools.islice(items, ITEMS_MAX + 1))
    if len(found) > ITEMS_MAX:
        raise ValueError(f"more than {ITEMS_MAX} items")
    return found


def _replied(action: Callable[[], dict[str, Any]]) -> str:
    try:
        return json.dumps(action())
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an exception of the candidate is its reply
        return json.dumps({"error": _described(error, CAUSES_MAX)})


def _described(error: BaseException, causes: int) -> list[Any]:
    """Describe an exception as plain values: names of its class and bases, text, arguments, attributes and cause."""
    text = str(error)[:TEXT_CHARS_MAX]

    def keep(value: object) -> dict[str, Any]:
        if isinstance(value, BaseException) and causes:
            return {"error": _described(value, causes - 1)}
        if callable(value):
            raise TypeError("a function in an exception")
        return _keep(value)

    def bounded(value: Any) -> Any:
        encoded = encode(value, keep)
        if len(json.dumps(encoded)) > TEXT_CHARS_MAX:
            raise ValueError("too long")
        return encoded

    arguments, attributes, cause = [text], {}, None
    with contextlib.suppress(Exception):
        arguments = bounded(list(error.args))
    for name in dir(error):
        with contextlib.suppress(Exception):
            is_own = not name.startswith("_") and not hasattr(BaseException, name)
            if is_own and not callable(value := getattr(error, name)):
                attributes[name] = bounded(value)
    if len(json.dumps(attributes)) > TEXT_CHARS_MAX:
        attributes = {}
    if error.__cause__ is not None and causes:
        cause = _described(error.__cause__, causes - 1)
    return [_names(type(error)), text, arguments, attributes, cause]


def _names(kind: type) -> list[str]:
    """Return the names of a class and its bases: with the module, except for builtin ones."""
    return [
        base.__name__ if base.__module__ == "builtins" else f"{base.__module__}.{base.__name__}"
        for base in kind.__mro__
    ]


def _of(number: int | None, name: str) -> Any:
    return operator.attrgetter(name)(sys.modules[MODULE] if number is None else _objects[number])


def _keep(value: object) -> dict[str, Any]:
    if id(value) not in _numbers:
        if len(_objects) >= OBJECTS_MAX:
            raise MemoryError(f"more than {OBJECTS_MAX} objects are held")
        _objects.append(value)
        _numbers[id(value)] = len(_objects) - 1
    return {"stream" if hasattr(type(value), "__next__") else "object": _numbers[id(value)]}


def _take(_tag: str, number: Any) -> object:
    return _objects[number]
