"""The candidate's side of hidden tests that call it: looks up, calls, and keeps the objects that have no form as a value.

As in `candidate`, nothing here is trusted: it runs among the candidate's code, and all it sends is data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rollmesh.sandbox_runtime.judging.candidate import find
from rollmesh.sandbox_runtime.judging.values import decode, encode

OBJECTS_MAX = 10_000
_objects: list[object] = []


def look_up(name: str) -> str:
    """An attribute of the candidate's module, or of object N for `@N.name`: `{"value": ...}`, `{"callable": true}` or `{"error": [...]}`."""

    def found() -> dict[str, Any]:
        number, _, attribute = name.removeprefix("@").partition(".")
        target = getattr(_objects[int(number)], attribute) if name.startswith("@") else find(name)
        return {"callable": True} if callable(target) else {"value": encode(target, _keep)}

    return _told(found)


def invoke(question: str) -> str:
    """Call `name`, or method `name` of `object`, with `arguments` and `keywords`: `{"value": ...}` or `{"error": [...]}`."""

    def called() -> dict[str, Any]:
        asked = json.loads(question)
        target = find(asked["name"]) if asked["object"] is None else getattr(_objects[asked["object"]], asked["name"])
        arguments = decode(asked["arguments"], _take)
        keywords = decode(asked["keywords"], _take)
        return {"value": encode(target(*arguments, **keywords), _keep)}

    return _told(called)


def _told(action: Callable[[], dict[str, Any]]) -> str:
    try:
        return json.dumps(action())
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the candidate raises is its answer
        names = [kind.__name__ for kind in type(error).__mro__]
        return json.dumps({"error": [names, str(error)[:1000]]})


def _keep(value: object) -> int:
    if len(_objects) >= OBJECTS_MAX:
        raise MemoryError(f"more than {OBJECTS_MAX} objects are held")
    _objects.append(value)
    return len(_objects) - 1


def _take(number: Any) -> object:
    return _objects[number]
